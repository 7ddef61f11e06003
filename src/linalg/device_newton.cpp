#include "linalg/device_newton.h"

#include "linalg/newton.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <limits>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/small_inverse_root.h"
#include "cuda_kernels/symmetric_product.h"
#include "linalg/large_inverse_root.h"
#include "linalg/root_ladder.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::linalg::detail {

#ifdef TORCHIUM_WITH_CUDA

// Entries of the roots of matrices that are no worse than singular, in units of floor^(-1/p): for p
// = 1 the last step, which is far outside of its interval there, leaves up to 98.
constexpr float kLargestDeviceRoot = 2 * static_cast<float>(kLargestNewtonRoot);

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
  return has_kernel && root_ladder(p, newton_limits(n, at::kFloat).lowest_rung()) != nullptr;
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
               .largest_root = kLargestDeviceRoot}};
  const cuda_kernels::RootLadder& ladder = *root_ladder(p, limits.lowest_rung());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  if (arguments.rule.n <= cuda_kernels::kLargestSmallOrder) {
    C10_CUDA_CHECK(cuda_kernels::small_inverse_root(arguments, ladder, stream));
  } else {
    large_inverse_root(arguments, ladder, options, stream);
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
