#include "linalg/device_newton.h"

#include "linalg/newton.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <limits>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/large_inverse_root.h"
#include "cuda_kernels/small_inverse_root.h"
#include "cuda_kernels/symmetric_product.h"
#include "linalg/minimax_schedules.h"
#include "linalg/root_ladder.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>
#endif

namespace torchium::linalg::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

using cuda_kernels::LargeWorkspace;
using cuda_kernels::SmallLadder;
using cuda_kernels::SplitMatrices;
using cuda_kernels::SymmetricProduct;

// Buffers of large matrices take at most this, unless one matrix alone needs more.
constexpr int64_t kBufferBytes = int64_t{1} << 30;

// Errors of the first steps grow with those of the smallest eigenvalues. Measured at n = 1024:
// short sums make the error of the root four times smaller, in these steps as much as in all, and
// take 12 % more time.
constexpr int kExactSteps = 3;

// The purely quadratic ladder of the p-th root; null if it has more rungs or steps than the kernels
// can take. Kept for the life of the process.
const SmallLadder* quadratic_ladder(int64_t p, const NewtonLimits& limits) {
  static std::mutex mutex;
  static std::map<std::pair<int64_t, int64_t>, std::unique_ptr<SmallLadder>> ladders;
  const int64_t lowest = limits.lowest_rung();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, is_new] = ladders.try_emplace({p, lowest});
  if (is_new) {
    const MinimaxSchedules schedules(p, lowest, limits.unit_roundoff);
    const int64_t rungs = 1 - lowest;
    if (rungs <= SmallLadder::kMaxRungs && schedules.longest() <= cuda_kernels::kMostSteps &&
        rungs * static_cast<int64_t>(schedules.longest()) <= SmallLadder::kCapacity) {
      entry->second = schedules.ladder<SmallLadder>(lowest, 1);
    }
  }
  return entry->second.get();
}

// The iteration of a stack of large matrices. M, X, q and a product take one buffer each; a product
// goes to a free one, and the buffers change their roles.
class LargeIteration {
 public:
  // buffers: [4, matrices, 2, order, order] halves.
  LargeIteration(const cuda_kernels::InverseRoot& arguments, const SmallLadder& ladder,
                 const LargeWorkspace& workspace, const at::Tensor& buffers, cudaStream_t stream)
      : arguments_(arguments), ladder_(ladder), workspace_(workspace), stream_(stream) {
    for (int64_t i = 0; i < buffers.size(0); ++i) {
      free_.push_back({reinterpret_cast<__half*>(buffers.select(0, i).data_ptr()),
                       static_cast<int>(buffers.size(-1))});
    }
  }

  void run() {
    SplitMatrices M = take();
    SplitMatrices X{};
    C10_CUDA_CHECK(begin_inverse_root(arguments_, ladder_, workspace_, M, stream_));
    cuda_kernels::RootOfSteps roots{};
    for (int k = 0; k < ladder_.steps; ++k) {
      const SplitMatrices q = multiply(M, M, k, 1.0f, workspace_.coefficients(k));
      if (k == 0) {
        X = q;
      } else {
        const SplitMatrices next = multiply(X, q, k, k == 1 ? arguments_.rule.first : 1.0f);
        free_.push_back(std::exchange(X, next));
      }
      roots.X[k] = X;
      if (k + 1 < ladder_.steps) {
        multiply_by_power(M, q, k, X);
      }
    }
    C10_CUDA_CHECK(finish_inverse_root(arguments_, workspace_, roots, stream_));
  }

 private:
  SplitMatrices take() {
    TORCH_INTERNAL_ASSERT(!free_.empty());
    const SplitMatrices buffer = free_.back();
    free_.pop_back();
    return buffer;
  }

  // alpha A B, or with coefficients alpha (a I + b A + c A B), for matrices with more than `step`
  // steps.
  SplitMatrices multiply(const SplitMatrices& A, const SplitMatrices& B, int step,
                         float alpha = 1.0f, const float* coefficients = nullptr) {
    const SymmetricProduct product{.A = A,
                                   .B = B,
                                   .C = take(),
                                   .matrices = arguments_.matrices,
                                   .n = arguments_.rule.n,
                                   .alpha = alpha,
                                   .coefficients = coefficients,
                                   .steps = workspace_.steps(),
                                   .step = step,
                                   .stages_per_sum = step < kExactSteps ? 1 : 4};
    C10_CUDA_CHECK(symmetric_product(product, stream_));
    return product.C;
  }

  // M <- M q^p by repeated squaring, for matrices with another step after step k. X, which may be
  // q, is kept.
  void multiply_by_power(SplitMatrices& M, SplitMatrices q, int k, const SplitMatrices& X) {
    for (int p = arguments_.rule.p;; p /= 2) {
      if (p % 2 == 1) {
        free_.push_back(std::exchange(M, multiply(M, q, k + 1)));
      }
      const SplitMatrices power = q;
      if (p > 1) {
        q = multiply(q, q, k + 1);
      }
      if (power.data != X.data) {
        free_.push_back(power);
      }
      if (p == 1) {
        return;
      }
    }
  }

  const cuda_kernels::InverseRoot& arguments_;
  const SmallLadder& ladder_;
  const LargeWorkspace& workspace_;
  const cudaStream_t stream_;
  std::vector<SplitMatrices> free_;
};

// The matrices [begin, begin + count) of a stack.
cuda_kernels::InverseRoot part_of(cuda_kernels::InverseRoot stack, int64_t begin, int64_t count) {
  const int64_t elements = int64_t{stack.rule.n} * stack.rule.n;
  stack.A += begin * elements;
  stack.root += begin * elements;
  stack.residual += begin;
  stack.damping += begin;
  stack.floor += begin;
  stack.iterations += begin;
  stack.matrices = count;
  return stack;
}

void large_inverse_root(const cuda_kernels::InverseRoot& arguments, const SmallLadder& ladder,
                        const at::TensorOptions& options, cudaStream_t stream) {
  constexpr int64_t kPadding = cuda_kernels::kSplitPadding;
  const int n = arguments.rule.n;
  const int64_t order = (n + kPadding - 1) / kPadding * kPadding;
  const int64_t part = std::clamp<int64_t>(kBufferBytes / (16 * order * order), 1,
                                           std::max<int64_t>(1, arguments.matrices));
  const at::Tensor buffers = at::empty({4, part, 2, order, order}, options.dtype(at::kHalf));
  const at::Tensor memory =
      at::empty({static_cast<int64_t>(LargeWorkspace::bytes(part, n))}, options.dtype(at::kByte));
  for (int64_t begin = 0; begin < arguments.matrices; begin += part) {
    const int64_t count = std::min(part, arguments.matrices - begin);
    const cuda_kernels::InverseRoot range = part_of(arguments, begin, count);
    const LargeWorkspace workspace(memory.data_ptr(), count, n);
    LargeIteration(range, ladder, workspace, buffers, stream).run();
  }
}

}  // namespace

bool has_device_root(const at::Tensor& A, int64_t p) {
  if (!A.is_cuda() || A.scalar_type() != at::kFloat || A.numel() == 0 ||
      p > std::numeric_limits<int>::max()) {
    return false;
  }
  const cudaDeviceProp* device = at::cuda::getDeviceProperties(A.get_device());
  const auto shared_bytes = static_cast<int>(device->sharedMemPerBlockOptin);
  const auto n = static_cast<int>(A.size(-1));
  const bool has_kernel =
      n <= cuda_kernels::kLargestSmallOrder
          ? device->major >= 8 && cuda_kernels::small_inverse_root_shared_bytes(n) <= shared_bytes
          : cuda_kernels::has_symmetric_product(device->major, device->minor, shared_bytes);
  const NewtonLimits limits = newton_limits(n, at::kFloat);
  return has_kernel &&
         (n <= cuda_kernels::kLargestSmallOrder ? root_ladder(p, limits.lowest_rung()) != nullptr
                                                : quadratic_ladder(p, limits) != nullptr);
}

DeviceRoot device_inverse_root(const at::Tensor& A, int64_t p, double eps, double relative_eps) {
  const c10::cuda::CUDAGuard guard(A.device());
  const at::Tensor input = A.contiguous();
  const int64_t matrices = A.size(0);
  const auto options = A.options();
  const NewtonLimits limits = newton_limits(A.size(-1), at::kFloat);
  DeviceRoot result{at::empty_like(input), at::empty({matrices}, options),
                    at::empty({matrices}, options.dtype(at::kDouble)),
                    at::empty({matrices}, options.dtype(at::kLong)),
                    at::empty({matrices}, options.dtype(at::kDouble))};
  const cuda_kernels::InverseRoot arguments{
      .A = input.const_data_ptr<float>(),
      .root = result.root.mutable_data_ptr<float>(),
      .residual = result.residual.mutable_data_ptr<float>(),
      .damping = result.damping.mutable_data_ptr<double>(),
      .floor = result.floor.mutable_data_ptr<double>(),
      .iterations = result.iterations.mutable_data_ptr<int64_t>(),
      .matrices = matrices,
      .rule = {.n = static_cast<int>(A.size(-1)),
               .p = static_cast<int>(p),
               .eps = eps,
               .relative_eps = relative_eps,
               .noise = limits.noise,
               .noise_margin = NewtonLimits::kNoiseMargin,
               .lowest_start = limits.lowest_start,
               .smallest_floor = limits.smallest_floor,
               // The root of M is at most 2^22 for p = 1, 2^11 for p = 2.
               .first = p == 1 ? 0x1p-10f : 1.0f,
               .residual_tolerance = static_cast<float>(kNewtonResidualTolerance),
               .largest_root = static_cast<float>(kLargestNewtonRoot)}};
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  if (arguments.rule.n <= cuda_kernels::kLargestSmallOrder) {
    C10_CUDA_CHECK(
        cuda_kernels::small_inverse_root(arguments, *root_ladder(p, limits.lowest_rung()), stream));
  } else {
    large_inverse_root(arguments, *quadratic_ladder(p, limits), options, stream);
  }
  return result;
}

#else

bool has_device_root(const at::Tensor& A, int64_t p) { return false; }

DeviceRoot device_inverse_root(const at::Tensor& A, int64_t p, double eps, double relative_eps) {
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
}

#endif

}  // namespace torchium::linalg::detail
