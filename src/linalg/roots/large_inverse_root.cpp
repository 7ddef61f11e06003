#ifdef TORCHIUM_WITH_CUDA
#include "linalg/roots/large_inverse_root.h"

#include "cuda_kernels/inverse_root/large_inverse_root.h"
#include "cuda_kernels/split_gemm/symmetric_product.h"
#include "linalg/roots/device_newton.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace torchium::linalg::detail {
namespace {

using cuda_kernels::LargeOperands;
using cuda_kernels::LargeWorkspace;
using cuda_kernels::SplitMatrices;
using cuda_kernels::SymmetricProduct;

constexpr int64_t kBuffers = 4;

// Errors of the first steps grow with those of the smallest eigenvalues. Shorter sums there alone
// make the error of the root four times smaller (n = 1024), as much as in all steps.
constexpr int kExactSteps = 3;

// Terms of a sum. Matrices with fewer entries average fewer errors.
int terms_of_sum(int step, int order) {
  if (step >= kExactSteps) {
    return 256;
  }
  return order <= 256 ? 32 : 64;
}

// The products of one batch, in order. M, X, q and a product use one buffer each. A product is
// written to a free buffer, and the buffers change roles, so all addresses are known in advance.
class LargeIteration {
 public:
  // buffers: [4, matrices, 2, order, order] fp16 numbers.
  LargeIteration(const cuda_kernels::InverseRoot& arguments,
                 const cuda_kernels::RootScheduleTable& schedules, const LargeWorkspace& workspace,
                 const at::Tensor& buffers)
      : arguments_(arguments), schedules_(schedules), workspace_(workspace) {
    for (int64_t i = 0; i < buffers.size(0); ++i) {
      free_.push_back({reinterpret_cast<__half*>(buffers.select(0, i).data_ptr()),
                       static_cast<int>(buffers.size(-1))});
    }
    const std::vector<SplitMatrices> all = free_;
    M_ = take();
    for (int k = 0; k < schedules_.steps; ++k) {
      quadratic_step(k);
    }
    last_step();
    place_first_square(all);
  }

  void run(cudaStream_t stream) const {
    C10_CUDA_CHECK(fill_inverse_root(arguments_, workspace_, operands_.M, stream));
    C10_CUDA_CHECK(symmetric_product(first_square_, stream));
    C10_CUDA_CHECK(start_inverse_root(arguments_, schedules_, workspace_, operands_, stream));
    for (const SymmetricProduct& product : products_) {
      C10_CUDA_CHECK(symmetric_product(product, stream));
    }
    C10_CUDA_CHECK(finish_inverse_root(arguments_, workspace_, X_, stream));
  }

 private:
  SplitMatrices take() {
    TORCH_INTERNAL_ASSERT(!free_.empty());
    const SplitMatrices buffer = free_.back();
    free_.pop_back();
    return buffer;
  }

  // C = A B for the matrices that start at step k or earlier.
  SymmetricProduct product(const SplitMatrices& A, const SplitMatrices& B, const SplitMatrices& C,
                           int k) const {
    SymmetricProduct product{};
    product.A = A;
    product.B = B;
    product.C = C;
    product.matrices = arguments_.matrices;
    product.n = arguments_.rule.n;
    product.starts = workspace_.starts;
    product.latest_start = k;
    product.first_start = workspace_.first_start;
    product.terms_per_sum = terms_of_sum(k, A.order);
    return product;
  }
  SymmetricProduct& multiply(const SplitMatrices& A, const SplitMatrices& B, const SplitMatrices& C,
                             int k) {
    return products_.emplace_back(product(A, B, C, k));
  }

  // S = M^2 of all matrices, in a buffer that Z does not need.
  void place_first_square(const std::vector<SplitMatrices>& buffers) {
    operands_.M = operands_.steps[0].M;
    for (const SplitMatrices& buffer : buffers) {
      if (buffer.data == operands_.Z.data) {
        continue;
      }
      if (operands_.M.data == operands_.Z.data) {
        operands_.M = buffer;
      } else if (buffer.data != operands_.M.data) {
        operands_.S = buffer;
      }
    }
    first_square_ = product(operands_.M, operands_.M, operands_.S, 0);
    first_square_.squares = workspace_.squares;
    first_square_.first_start = nullptr;
  }

  // q = a I + b M + c M^2, X <- X q, M <- M q^p. Matrices that start here already have q, as their
  // X.
  void quadratic_step(int k) {
    const SplitMatrices q = take(), next = take();
    operands_.steps[k] = {M_, next};
    if (k > 0) {
      SymmetricProduct& polynomial = multiply(M_, M_, q, k - 1);
      polynomial.D = M_;
      polynomial.coefficients = workspace_.quadratic(k);
      multiply(X_, q, next, k - 1).latest_factor = arguments_.rule.first;
      free_.push_back(X_);
    }
    X_ = next;
    multiply_by_power(q, k);
    SymmetricProduct& last = products_.back();
    const bool is_last_step = k + 1 == schedules_.steps;
    last.coefficients = is_last_step ? workspace_.last_Z() : workspace_.power(k);
    last.single_C = is_last_step;
  }

  // M <- M q^p by repeated squaring of q, which is overwritten. For matrices that start here X is
  // q.
  void multiply_by_power(SplitMatrices q, int k) {
    SplitMatrices first_q = X_;
    for (int p = arguments_.rule.p;; p /= 2) {
      if (p % 2 == 1) {
        const SplitMatrices next = take();
        multiply(M_, q, next, k).first_B = first_q;
        free_.push_back(std::exchange(M_, next));
      }
      if (p == 1) {
        free_.push_back(q);
        return;
      }
      const SplitMatrices square = take();
      multiply(q, q, square, k).first_B = first_q;
      free_.push_back(std::exchange(q, square));
      first_q = {};
    }
  }

  // X <- X q, q = I + W from products of single fp16 parts.
  void last_step() {
    const int k = schedules_.steps;
    const SplitMatrices Z = M_, S{Z.data + Z.elements(), Z.order}, V = take(), q = take();
    operands_.Z = Z;
    operands_.X = X_;

    SymmetricProduct& square = multiply(Z, Z, S, k);
    square.single = square.single_C = true;

    SymmetricProduct& cubic = multiply(Z, S, V, k);
    cubic.D = S;
    cubic.E = Z;
    cubic.coefficients = workspace_.last_V();
    cubic.single = cubic.single_D = cubic.single_C = true;

    SymmetricProduct& polynomial = multiply(V, V, q, k);
    polynomial.D = Z;
    polynomial.E = S;
    polynomial.coefficients = workspace_.last_q();
    polynomial.single = polynomial.single_D = true;

    multiply(X_, q, Z, k);
    X_ = Z;
  }

  const cuda_kernels::InverseRoot& arguments_;
  const cuda_kernels::RootScheduleTable& schedules_;
  const LargeWorkspace& workspace_;
  std::vector<SplitMatrices> free_;
  SymmetricProduct first_square_{};
  std::vector<SymmetricProduct> products_;
  LargeOperands operands_{};
  SplitMatrices M_{}, X_{};
};

// The matrices [begin, begin + count) of a batch.
cuda_kernels::InverseRoot part_of(cuda_kernels::InverseRoot batch, int64_t begin, int64_t count) {
  const int64_t elements = int64_t{batch.rule.n} * batch.rule.n;
  batch.A += begin * elements;
  batch.root += begin * elements;
  batch.residual += begin;
  batch.damping += begin;
  batch.floor += begin;
  batch.iterations += begin;
  if (batch.divisors != nullptr) batch.divisors += begin;
  if (batch.eps != nullptr) batch.eps += begin;
  if (batch.failures != nullptr) batch.failures += begin;
  if (batch.wanted != nullptr) batch.wanted += begin;
  batch.matrices = count;
  return batch;
}

}  // namespace

LargeRootMemory::LargeRootMemory(int64_t matrices, int n, const at::TensorOptions& options) {
  constexpr int64_t kPadding = cuda_kernels::kSplitPadding;
  const int64_t order = (n + kPadding - 1) / kPadding * kPadding;
  const int64_t bytes_of_matrix = kBuffers * 4 * order * order;
  const int64_t part = std::clamp<int64_t>(large_root_buffer_limit(order) / bytes_of_matrix, 1,
                                           std::max<int64_t>(1, matrices));
  buffers = at::empty({kBuffers, part, 2, order, order}, options.dtype(at::kHalf));
  const LargeWorkspace workspace(nullptr, part, static_cast<int>(order));
  others = at::empty({static_cast<int64_t>(workspace.bytes)}, options.dtype(at::kByte));
}

void large_inverse_root(const cuda_kernels::InverseRoot& arguments,
                        const cuda_kernels::RootScheduleTable& schedules,
                        const LargeRootMemory& memory, cudaStream_t stream) {
  const int64_t part = memory.buffers.size(1);
  const auto order = static_cast<int>(memory.buffers.size(-1));
  for (int64_t begin = 0; begin < arguments.matrices; begin += part) {
    const int64_t count = std::min(part, arguments.matrices - begin);
    const cuda_kernels::InverseRoot range = part_of(arguments, begin, count);
    const LargeWorkspace workspace(memory.others.data_ptr(), count, order);
    LargeIteration(range, schedules, workspace, memory.buffers).run(stream);
  }
}

}  // namespace torchium::linalg::detail
#endif
