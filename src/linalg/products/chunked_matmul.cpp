#include "linalg/products/chunked_matmul.h"

#include "linalg/common/operand_checks.h"
#include "linalg/products/product_workspace.h"
#include "linalg/products/streamed_matmul.h"
#include "linalg/products/tile_product.h"

#include <ATen/TensorUtils.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

namespace torchium::linalg::detail {
namespace {

constexpr auto kChunkedMatmul = "chunked_matmul";

// Smaller tiles waste the kernel of split products.
constexpr int64_t kLeastSplitTile = 256;

ProductOptions product_options(std::optional<int64_t> max_workspace_bytes,
                               std::optional<std::string_view> precision) {
  ProductOptions options{max_workspace_bytes, std::nullopt};
  if (precision) options.precision = std::string(*precision);
  return options;
}

std::vector<c10::SymInt> check_chunked_matmul(const at::Tensor& A, const at::Tensor& B,
                                              const ProductOptions& options) {
  check_matrices(kChunkedMatmul, {{"A", A}});
  check_matrices(kChunkedMatmul, {{"B", B}});
  const bool may_stream = (A.is_cpu() && B.is_cuda()) || (A.is_cuda() && B.is_cpu());
  if (!may_stream) check_matrices(kChunkedMatmul, {{"A", A}, {"B", B}});  // of one device
  TORCH_CHECK_VALUE(A.scalar_type() == B.scalar_type(), kChunkedMatmul, ": B has dtype ",
                    B.scalar_type(), " and A has ", A.scalar_type(),
                    "; convert one of them with .to(dtype)");
  TORCH_CHECK_VALUE(A.sym_size(-1) == B.sym_size(-2), kChunkedMatmul, ": A has shape ",
                    A.sym_sizes(), " and B ", B.sym_sizes(),
                    "; they must be [..., m, k] and [..., k, n]");
  const auto limit = options.max_workspace_bytes.value_or(0);
  TORCH_CHECK_VALUE(limit >= 0, kChunkedMatmul, ": max_workspace_bytes is ", limit,
                    "; it must not be negative");
  const auto precision = options.precision.value_or("highest");
  TORCH_CHECK_VALUE(precision == "highest" || precision == "high", kChunkedMatmul,
                    ": precision is '", precision,
                    "'; it must be 'highest' or 'high', or None for torch's setting");
  auto sizes = broadcast_batch(kChunkedMatmul, {{"A", A}, {"B", B}});
  sizes.insert(sizes.end(), {A.sym_size(-2), B.sym_size(-1)});
  return sizes;
}

// Computes out = A B where the operands are, within a budget of bytes, through buffers that are
// allocated once.
class ChunkedProduct {
 public:
  ChunkedProduct(const at::Tensor& A, const ProductOptions& options)
      : product_(A.scalar_type(), A.device(), matmul_precision(options.precision)),
        requested_(options.max_workspace_bytes) {}

  // [b, m, k] by [b, k, n].
  void run(const at::Tensor& out, const at::Tensor& A, const at::Tensor& B) {
    const int64_t m = out.size(-2), n = out.size(-1), k = A.size(-1);
    if (product_.split(m, n, k)) {
      bytes_ = product_.bytes(A, B);
      budget_ = workspace_budget(out.device(), requested_, bytes_.of(m, n));
      tile_ = split_tile(out, k);
      if (std::min(tile_.rows, m) >= std::min(m, kLeastSplitTile) &&
          std::min(tile_.columns, n) >= std::min(n, kLeastSplitTile)) {
        return multiply(out, A, B);
      }
      product_.use_float32();
    }
    bytes_ = product_.bytes(A, B);
    const auto matrices = static_cast<double>(out.numel() / (m * n));
    budget_ = workspace_budget(out.device(), requested_, matrices * bytes_.of(m, n));
    check_budget(kChunkedMatmul, A, B, budget_, static_cast<int64_t>(bytes_.of(1, 1)));
    tile_ = bytes_.of(m, n) <= static_cast<double>(budget_) ? Tile{m, n}
                                                            : choose_tile(m, n, bytes_, budget_);
    multiply(out, A, B);
  }

 private:
  // Whole rows of the result, which need no copy, if enough of them fit.
  Tile split_tile(const at::Tensor& out, int64_t k) {
    constexpr int64_t kManyRows = 1024;
    // Padding of rows to a multiple of 8, and of allocations.
    constexpr int64_t kPadding = 7, kAllocations = 8 * 512;
    const int64_t m = out.size(-2), n = out.size(-1);
    const int64_t budget = budget_ - kAllocations - kPadding * 4 * (m + k);
    if (n % 8 == 0 && out.stride(-2) == n) {
      const int64_t rows =
          budget <= bytes_.column * n ? 0 : (budget - bytes_.column * n) / bytes_.row;
      if (rows >= std::min(m, kManyRows)) return {aligned_size(rows, m), n};
    }
    return budget < bytes_.of(1, 1) ? Tile{0, 0} : choose_tile(m, n, bytes_, budget);
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

  // As many whole matrices at a time as fit, otherwise tiles of each.
  void multiply_batch(const at::Tensor& out, const at::Tensor& A, const at::Tensor& B) {
    const int64_t b = out.size(0), m = out.size(1), n = out.size(2);
    const double whole = bytes_.of(m, n), most = static_cast<double>(b);
    const double matrices = product_.is_split() ? 1
                            : whole == 0        ? most
                                                : static_cast<double>(budget_) / whole;
    const auto step = static_cast<int64_t>(std::clamp(matrices, 1.0, most));
    for (int64_t i = 0; i < b; i += step) {
      const int64_t count = std::min(step, b - i);
      for (int64_t column = 0; column < n; column += tile_.columns) {
        const int64_t columns = std::min(tile_.columns, n - column);
        const auto B_part =
            product_.column_operand(B.narrow(0, i, count).narrow(2, column, columns), B_buffer_);
        for (int64_t row = 0; row < m; row += tile_.rows) {
          const int64_t rows = std::min(tile_.rows, m - row);
          const auto A_part =
              product_.row_operand(A.narrow(0, i, count).narrow(1, row, rows), A_buffer_);
          auto out_part = out.narrow(0, i, count).narrow(1, row, rows).narrow(2, column, columns);
          product_.multiply(out_part, A_part, B_part);
        }
      }
    }
  }

  TileProduct product_;
  std::optional<int64_t> requested_;
  int64_t budget_ = 0;
  TileBytes bytes_;
  Tile tile_{};
  at::Tensor A_buffer_, B_buffer_;
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

// The operands as matrices or batches of equal size, and where their product goes.
struct Operands {
  at::Tensor out, A, B;
};

Operands arranged(const at::Tensor& out, const at::Tensor& A, const at::Tensor& B) {
  const int64_t m = A.size(-2), k = A.size(-1), n = B.size(-1);
  const at::DimVector rows{A.numel() / k, k};
  if (B.numel() == k * n && at::detail::computeStride(A.sizes(), A.strides(), rows)) {
    // One B for all: the batch dimensions of A become rows.
    return {out.view({-1, n}), A.view(rows), B.view({k, n})};
  }
  const auto batch = out.sizes().slice(0, out.dim() - 2);
  const auto expanded = [&batch](const at::Tensor& x, int64_t rows, int64_t columns) {
    auto shape = batch.vec();
    shape.insert(shape.end(), {rows, columns});
    return x.expand(shape);
  };
  return {out, expanded(A, m, k), expanded(B, k, n)};
}

}  // namespace

at::Tensor chunked_matmul_meta(const at::Tensor& A, const at::Tensor& B,
                               std::optional<int64_t> max_workspace_bytes,
                               std::optional<std::string_view> precision) {
  const auto sizes = check_chunked_matmul(A, B, product_options(max_workspace_bytes, precision));
  return at::empty_symint(sizes, A.options());
}

at::Tensor chunked_matmul(const at::Tensor& A, const at::Tensor& B,
                          std::optional<int64_t> max_workspace_bytes,
                          std::optional<std::string_view> precision) {
  const auto options = product_options(max_workspace_bytes, precision);
  const auto result_sizes = check_chunked_matmul(A, B, options);
  const auto sizes = C10_AS_INTARRAYREF_SLOW(result_sizes);
  return explain_out_of_memory(sizes, A, B, max_workspace_bytes, [&] {
    const auto placement = product_placement(A, B, sizes);
    c10::OptionalDeviceGuard guard;
    if (placement.device.is_cuda()) guard.reset_device(placement.device);
    auto out = at::empty(sizes, placement.result);
    if (out.numel() == 0 || A.size(-1) == 0) return out.zero_();
    const auto [result, left, right] = arranged(out, A.resolve_neg(), B.resolve_neg());
    if (placement.is_streamed) {
      streamed_matmul(result, left, right, placement.device, options);
    } else {
      ChunkedProduct(left, options).run(result, left, right);
    }
    return out;
  });
}

}  // namespace torchium::linalg::detail
