#include "linalg/products/fused_mul_add.h"

#include "linalg/operand_checks.h"

#include <ATen/ops/addcmul.h>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/common/fused_mul_add.h"
#include "support/device_code.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <type_traits>
#endif

namespace torchium::linalg::detail {
namespace {

#ifdef TORCHIUM_WITH_CUDA
// torch's scalar type as CUDA's.
template <typename T>
using CudaScalar =
    std::conditional_t<std::is_same_v<T, at::Half>, __half,
                       std::conditional_t<std::is_same_v<T, at::BFloat16>, __nv_bfloat16, T>>;

bool alike_and_contiguous(const at::Tensor& x, const at::Tensor& like) {
  return x.device() == like.device() && x.scalar_type() == like.scalar_type() &&
         x.sizes() == like.sizes() && x.is_contiguous() && !x.is_neg();
}

at::Tensor fused_mul_add_cuda(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  torchium::detail::check_device_code(c.device());
  const c10::cuda::CUDAGuard device_guard(c.device());
  auto out = at::empty_like(c);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.scalar_type(), "fused_mul_add", [&] {
    using T = CudaScalar<scalar_t>;
    const auto pointer = [](const at::Tensor& x) {
      return reinterpret_cast<const T*>(x.const_data_ptr<scalar_t>());
    };
    cuda_kernels::fused_mul_add<T>(pointer(a), pointer(b), pointer(c),
                                   reinterpret_cast<T*>(out.mutable_data_ptr<scalar_t>()),
                                   c.numel(), c10::cuda::getCurrentCUDAStream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}
#endif

void check_operands(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  for (const auto& operand : {Operand{"a", a}, Operand{"b", b}, Operand{"c", c}}) {
    check_floating("fused_mul_add", operand);
  }
}

}  // namespace

at::Tensor fused_mul_add_by_torch(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
  check_operands(a, b, c);
  return at::addcmul(c, a, b);
}

at::Tensor fused_mul_add(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
#ifdef TORCHIUM_WITH_CUDA
  check_operands(a, b, c);
  if (c.is_cuda() && alike_and_contiguous(c, c) && alike_and_contiguous(a, c) &&
      alike_and_contiguous(b, c)) {
    return fused_mul_add_cuda(a, b, c);
  }
#endif
  return fused_mul_add_by_torch(a, b, c);
}

}  // namespace torchium::linalg::detail
