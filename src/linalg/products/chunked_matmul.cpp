#include "linalg/products/chunked_matmul.h"

#include "linalg/operand_checks.h"
#include <torchium/memory.h>

#include <ATen/TensorUtils.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace torchium::linalg::detail {
namespace {

// Workspaces up to this size are allocated without querying the free memory.
constexpr int64_t kSmallWorkspaceBytes = int64_t{64} << 20;
constexpr int64_t kFreeMemoryFraction = 4;

std::vector<c10::SymInt> check_chunked_matmul(const at::Tensor& A, const at::Tensor& B,
                                              std::optional<int64_t> max_workspace_bytes) {
  constexpr auto op = "chunked_matmul";
  check_matrices(op, {{"A", A}, {"B", B}});
  TORCH_CHECK_VALUE(A.sym_size(-1) == B.sym_size(-2), op, ": A has shape ", A.sym_sizes(),
                    " and B ", B.sym_sizes(), "; they must be [..., m, k] and [..., k, n]");
  TORCH_CHECK_VALUE(max_workspace_bytes.value_or(0) >= 0, op, ": max_workspace_bytes is ",
                    max_workspace_bytes.value_or(0), "; it must not be negative");
  auto sizes = broadcast_batch(op, {{"A", A}, {"B", B}});
  sizes.insert(sizes.end(), {A.sym_size(-2), B.sym_size(-1)});
  return sizes;
}

// The memory of one matrix product in addition to its operands and its result. A copied operand
// costs bytes per element in the workspace at a time.
struct CopyPlan {
  int64_t A_bytes = 0;       // an element of A: converted, or made contiguous
  int64_t B_bytes = 0;       // an element of B
  int64_t result_bytes = 0;  // an element of the result, before it is rounded to the output dtype
};

// Whether BLAS can read the matrices in place.
bool blas_readable(const at::Tensor& x) {
  const auto rows = x.size(-2), columns = x.size(-1);
  return (x.stride(-1) == 1 && x.stride(-2) >= std::max<int64_t>(1, columns)) ||
         (x.stride(-2) == 1 && x.stride(-1) >= std::max<int64_t>(1, rows));
}

struct Tile {
  int64_t rows;
  int64_t columns;
};

// Tiles of a multiple of this keep the alignment that fast kernels need: on an H200 a bfloat16
// product of order 8192 took 8.5 ms in tiles of 4095 columns and 1.76 ms in aligned ones.
constexpr int64_t kAlignment = 64;

int64_t aligned(int64_t size, int64_t limit) {
  return size >= limit ? limit : size < kAlignment ? size : size / kAlignment * kAlignment;
}

// A large tile of an [m, n] result whose workspace, row_bytes per row, column_bytes per column and
// element_bytes per element, is at most `budget`: near square, then widened to the edges. The
// caller has checked that a 1 x 1 tile fits.
Tile choose_tile(int64_t m, int64_t n, int64_t row_bytes, int64_t column_bytes,
                 int64_t element_bytes, int64_t budget) {
  const auto fit = [budget](int64_t used, int64_t each, int64_t limit) {
    return each == 0 ? limit : aligned(std::max<int64_t>(1, (budget - used) / each), limit);
  };
  // The side of the square solves element_bytes side^2 + linear side = budget.
  const double linear = static_cast<double>(row_bytes) + static_cast<double>(column_bytes);
  const double constant = static_cast<double>(budget);
  const double root =
      std::sqrt(linear * linear + 4.0 * static_cast<double>(element_bytes) * constant);
  const double side = std::clamp(2.0 * constant / (linear + root), 1.0, static_cast<double>(n));
  int64_t columns = aligned(static_cast<int64_t>(side), n);
  const int64_t rows = fit(column_bytes * columns, row_bytes + element_bytes * columns, m);
  columns = fit(row_bytes * rows, column_bytes + element_bytes * rows, n);
  return {rows, columns};
}

// Computes out = A B within a budget of bytes, through buffers that are allocated once.
class ChunkedProduct {
 public:
  ChunkedProduct(const at::Tensor& A, const at::Tensor& B, std::optional<int64_t> budget)
      : compute_dtype_(compute_dtype(A)),
        // cuBLAS multiplies half-precision operands into float32 results itself.
        operand_dtype_(A.is_cuda() ? A.scalar_type() : compute_dtype_),
        requested_(budget) {
    const bool convert = A.scalar_type() != operand_dtype_;
    const auto operand_bytes = static_cast<int64_t>(c10::elementSize(operand_dtype_));
    if (convert || !blas_readable(A)) plan_.A_bytes = operand_bytes;
    if (convert || !blas_readable(B)) plan_.B_bytes = operand_bytes;
    if (A.scalar_type() != compute_dtype_) {
      plan_.result_bytes = static_cast<int64_t>(c10::elementSize(compute_dtype_));
    }
  }

  void run(const at::Tensor& out, const at::Tensor& A, const at::Tensor& B) {
    set_budget(out, A.size(-1));
    multiply(out, A, B);
  }

 private:
  void set_budget(const at::Tensor& out, int64_t k) {
    const int64_t m = out.size(-2), n = out.size(-1);
    const double everything =
        static_cast<double>(out.numel() / (m * n)) *
        (static_cast<double>(plan_.A_bytes) * static_cast<double>(m * k) +
         static_cast<double>(plan_.B_bytes) * static_cast<double>(k * n) +
         static_cast<double>(plan_.result_bytes) * static_cast<double>(m * n));
    if (requested_) {
      budget_ = *requested_;
    } else if (everything <= kSmallWorkspaceBytes) {
      budget_ = kSmallWorkspaceBytes;
    } else {
      budget_ = std::max(kSmallWorkspaceBytes, free_memory(out.device()) / kFreeMemoryFraction);
    }
    const int64_t least = (plan_.A_bytes + plan_.B_bytes) * k + plan_.result_bytes;
    TORCH_CHECK_VALUE(budget_ >= least, "chunked_matmul: max_workspace_bytes is ", budget_,
                      "; one element of the product of [", m, ", ", k, "] and [", k, ", ", n,
                      "] needs ", least);
  }

  // Any number of batch dimensions: splits off leading ones until the rest can be flattened.
  void multiply(const at::Tensor& out, const at::Tensor& A, const at::Tensor& B) {
    if (out.dim() == 2) {
      multiply_batch(out.unsqueeze(0), A.unsqueeze(0), B.unsqueeze(0));
    } else if (out.dim() == 3) {
      multiply_batch(out, A, B);
    } else if (collapsible(A) && collapsible(B)) {
      multiply_batch(out.view(collapsed_shape(out)), A.view(collapsed_shape(A)),
                     B.view(collapsed_shape(B)));
    } else {
      for (int64_t i = 0; i < out.size(0); ++i) multiply(out[i], A[i], B[i]);
    }
  }

  static at::DimVector collapsed_shape(const at::Tensor& x) {
    return {x.numel() / (x.size(-2) * x.size(-1)), x.size(-2), x.size(-1)};
  }

  static bool collapsible(const at::Tensor& x) {
    return at::detail::computeStride(x.sizes(), x.strides(), collapsed_shape(x)).has_value();
  }

  // [b, m, k] by [b, k, n]: as many whole matrices at a time as fit, otherwise tiles of each.
  void multiply_batch(const at::Tensor& out, const at::Tensor& A, const at::Tensor& B) {
    const int64_t b = out.size(0), m = out.size(1), n = out.size(2), k = A.size(2);
    const int64_t row_bytes = plan_.A_bytes * k, column_bytes = plan_.B_bytes * k;
    const double whole = static_cast<double>(row_bytes) * static_cast<double>(m) +
                         static_cast<double>(column_bytes) * static_cast<double>(n) +
                         static_cast<double>(plan_.result_bytes) * static_cast<double>(m * n);
    const double matrices =
        whole == 0 ? static_cast<double>(b) : static_cast<double>(budget_) / whole;
    const auto step = static_cast<int64_t>(std::clamp(matrices, 1.0, static_cast<double>(b)));
    const Tile tile = matrices >= 1
                          ? Tile{m, n}
                          : choose_tile(m, n, row_bytes, column_bytes, plan_.result_bytes, budget_);
    for (int64_t i = 0; i < b; i += step) {
      const int64_t count = std::min(step, b - i);
      for (int64_t column = 0; column < n; column += tile.columns) {
        const int64_t columns = std::min(tile.columns, n - column);
        const auto B_part =
            operand(B.narrow(0, i, count).narrow(2, column, columns), plan_.B_bytes > 0, B_buffer_);
        for (int64_t row = 0; row < m; row += tile.rows) {
          const int64_t rows = std::min(tile.rows, m - row);
          const auto A_part =
              operand(A.narrow(0, i, count).narrow(1, row, rows), plan_.A_bytes > 0, A_buffer_);
          auto out_part = out.narrow(0, i, count).narrow(1, row, rows).narrow(2, column, columns);
          multiply_tile(out_part, A_part, B_part);
        }
      }
    }
  }

  // The part itself, or its contiguous copy in `buffer`.
  at::Tensor operand(const at::Tensor& part, bool copied, at::Tensor& buffer) const {
    if (!copied) return part;
    return view_of(buffer, part.sizes(), part.options().dtype(operand_dtype_)).copy_(part);
  }

  void multiply_tile(at::Tensor& out, const at::Tensor& A, const at::Tensor& B) {
    if (plan_.result_bytes == 0) {
      multiply_into(out, A, B);
      return;
    }
    auto result = view_of(result_buffer_, out.sizes(), out.options().dtype(compute_dtype_));
    multiply_into(result, A, B);
    out.copy_(result);
  }

  void multiply_into(at::Tensor& out, const at::Tensor& A, const at::Tensor& B) const {
    if (operand_dtype_ != compute_dtype_) {
      at::bmm_out(out, A, B, compute_dtype_);
    } else if (out.size(0) == 1) {
      auto matrix = out[0];
      at::mm_out(matrix, A[0], B[0]);
    } else {
      at::bmm_out(out, A, B);
    }
  }

  // A contiguous tensor at the beginning of `buffer`, which the first (and largest) use allocates.
  at::Tensor view_of(at::Tensor& buffer, at::IntArrayRef sizes,
                     const at::TensorOptions& options) const {
    const auto numel = c10::multiply_integers(sizes);
    if (!buffer.defined() || buffer.numel() < numel) buffer = at::empty({numel}, options);
    return buffer.narrow(0, 0, numel).view(sizes);
  }

  at::ScalarType compute_dtype_;
  at::ScalarType operand_dtype_;
  std::optional<int64_t> requested_;
  int64_t budget_ = 0;
  CopyPlan plan_;
  at::Tensor A_buffer_, B_buffer_, result_buffer_;
};

// Runs `compute`; adds the sizes and the remedy to an error of the allocator.
template <typename Compute>
at::Tensor explain_out_of_memory(at::IntArrayRef sizes, const at::Tensor& A, const at::Tensor& B,
                                 std::optional<int64_t> max_workspace_bytes, Compute compute) {
  const auto explain = [&](const c10::Error& error) {
    std::string limit = max_workspace_bytes ? std::to_string(*max_workspace_bytes) + " bytes"
                                            : "a quarter of the free memory";
    C10_THROW_ERROR(
        OutOfMemoryError,
        c10::str("chunked_matmul: out of memory for the product of ", A.sizes(), " and ", B.sizes(),
                 ": the result ", sizes, " takes ",
                 static_cast<double>(c10::multiply_integers(sizes)) *
                     static_cast<double>(A.element_size()),
                 " bytes, the workspace at most ", limit,
                 ". Lower max_workspace_bytes, or multiply fewer rows or matrices at a time. (",
                 error.what_without_backtrace(), ")"));
  };
  try {
    return compute();
  } catch (const c10::OutOfMemoryError& error) {
    explain(error);
  } catch (const c10::Error& error) {
    // The CPU allocator has no type of its own.
    if (error.msg().find("can't allocate memory") == std::string::npos) throw;
    explain(error);
  }
  TORCH_INTERNAL_ASSERT(false);
}

}  // namespace

at::Tensor chunked_matmul_meta(const at::Tensor& A, const at::Tensor& B,
                               std::optional<int64_t> max_workspace_bytes) {
  return at::empty_symint(check_chunked_matmul(A, B, max_workspace_bytes), A.options());
}

at::Tensor chunked_matmul(const at::Tensor& A, const at::Tensor& B,
                          std::optional<int64_t> max_workspace_bytes) {
  const auto result_sizes = check_chunked_matmul(A, B, max_workspace_bytes);
  const auto sizes = C10_AS_INTARRAYREF_SLOW(result_sizes);
  return explain_out_of_memory(sizes, A, B, max_workspace_bytes, [&] {
    auto out = at::empty(sizes, A.options());
    const int64_t m = A.size(-2), k = A.size(-1), n = B.size(-1);
    if (out.numel() == 0 || k == 0) return out.zero_();
    ChunkedProduct product(A, B, max_workspace_bytes);
    const at::DimVector rows{A.numel() / k, k};
    if (B.numel() == k * n && at::detail::computeStride(A.sizes(), A.strides(), rows)) {
      // One B for all: the batch dimensions of A become rows.
      product.run(out.view({-1, n}), A.view(rows), B.view({k, n}));
    } else {
      const auto batch = at::IntArrayRef(sizes).slice(0, sizes.size() - 2);
      const auto expanded = [&batch](const at::Tensor& x, int64_t rows, int64_t columns) {
        auto shape = batch.vec();
        shape.insert(shape.end(), {rows, columns});
        return x.expand(shape);
      };
      product.run(out, expanded(A, m, k), expanded(B, k, n));
    }
    return out;
  });
}

}  // namespace torchium::linalg::detail
