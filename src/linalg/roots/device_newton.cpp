#include "linalg/roots/device_newton.h"

#include "linalg/roots/newton.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <limits>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/inverse_root/small_inverse_root.h"
#include "cuda_kernels/split_gemm/symmetric_product.h"
#include "linalg/roots/large_inverse_root.h"
#include "linalg/roots/root_schedule_table.h"
#include "support/device_code.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::linalg::detail {

#ifdef TORCHIUM_WITH_CUDA

// A bound of the entries of roots of semi-definite matrices, in units of floor^(-1/p): for p = 1
// the last step, far outside its interval, leaves up to 98.
constexpr float kLargestDeviceRoot = 2 * static_cast<float>(kLargestNewtonRoot);

namespace {

// For small matrices the kernels use an interval that is twice as long: their schedules, which end
// with the last step, need no additional step for it, and errors close to the floor are three times
// smaller. Residuals are about the same.
NewtonLimits device_limits(int64_t n) {
  NewtonLimits limits = newton_limits(n, at::kFloat);
  limits.lowest_start = std::max(16 * limits.unit_roundoff, limits.noise);
  return limits;
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
  return has_kernel && root_schedule_table(p, device_limits(n).lowest_level()) != nullptr;
}

namespace {

// The kernels' outputs per matrix in addition to its root.
struct Verdicts {
  explicit Verdicts(const at::Tensor& A)
      : residual(at::empty({A.size(0)}, A.options())),
        damping(at::empty({A.size(0)}, A.options().dtype(at::kDouble))),
        iterations(at::empty({A.size(0)}, A.options().dtype(at::kLong))),
        floor(at::empty({A.size(0)}, A.options().dtype(at::kDouble))) {}

  at::Tensor residual, damping, iterations, floor;
};

cuda_kernels::InverseRoot root_arguments(const at::Tensor& A, int64_t p, double eps,
                                         double relative_eps, const at::Tensor& root,
                                         const Verdicts& verdicts) {
  const NewtonLimits limits = device_limits(A.size(-1));
  return {.A = A.const_data_ptr<float>(),
          .root = root.mutable_data_ptr<float>(),
          .residual = verdicts.residual.mutable_data_ptr<float>(),
          .damping = verdicts.damping.mutable_data_ptr<double>(),
          .floor = verdicts.floor.mutable_data_ptr<double>(),
          .iterations = verdicts.iterations.mutable_data_ptr<int64_t>(),
          .matrices = A.size(0),
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
                   .largest_root = kLargestDeviceRoot}};
}

void run(const cuda_kernels::InverseRoot& arguments, const at::TensorOptions& options) {
  torchium::detail::check_device_code(options.device());
  const int64_t n = arguments.rule.n;
  const cuda_kernels::RootScheduleTable& schedules =
      *root_schedule_table(arguments.rule.p, device_limits(n).lowest_level());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  if (n <= cuda_kernels::kLargestSmallOrder) {
    C10_CUDA_CHECK(cuda_kernels::small_inverse_root(arguments, schedules, stream));
  } else {
    large_inverse_root(arguments, schedules, options, stream);
  }
}

}  // namespace

DeviceRoot device_inverse_root(const at::Tensor& A, int64_t p, double eps, double relative_eps) {
  const c10::cuda::CUDAGuard device_guard(A.device());
  const at::Tensor input = A.contiguous();
  const at::Tensor root = at::empty_like(input);
  const Verdicts verdicts(input);
  run(root_arguments(input, p, eps, relative_eps, root, verdicts), A.options());
  return {root, verdicts.residual, verdicts.damping, verdicts.iterations, verdicts.floor};
}

void renew_inverse_roots(const at::Tensor& A, const at::Tensor& divisors, int64_t p, double eps,
                         double relative_eps, const RenewedRoots& renewed) {
  TORCH_INTERNAL_ASSERT(A.is_contiguous() && renewed.roots.is_contiguous() &&
                        renewed.failures.is_contiguous());
  const c10::cuda::CUDAGuard device_guard(A.device());
  const Verdicts verdicts(A);
  cuda_kernels::InverseRoot arguments =
      root_arguments(A, p, eps, relative_eps, renewed.roots, verdicts);
  arguments.failures = renewed.failures.mutable_data_ptr<int32_t>();
  if (divisors.defined()) {
    TORCH_INTERNAL_ASSERT(divisors.is_contiguous());
    arguments.divisors = divisors.const_data_ptr<double>();
  }
  if (renewed.keep.defined()) {
    arguments.keep = renewed.keep.const_data_ptr<bool>();
  }
  run(arguments, A.options());
}

#else

bool has_device_root(const at::Tensor& A, int64_t p) { return false; }

DeviceRoot device_inverse_root(const at::Tensor& A, int64_t p, double eps, double relative_eps) {
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
}

void renew_inverse_roots(const at::Tensor& A, const at::Tensor& divisors, int64_t p, double eps,
                         double relative_eps, const RenewedRoots& renewed) {
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
}

#endif

}  // namespace torchium::linalg::detail
