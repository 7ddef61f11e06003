#include "linalg/structured/dense_product.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mv.h>
#include <c10/core/GradMode.h>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/krylov/row_block_product.h"
#include "support/derivatives.h"
#include "support/device_code.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::linalg::detail {
namespace {

#ifdef TORCHIUM_WITH_CUDA
bool has_kernel(const at::Tensor& A, const at::Tensor& X) {
  const bool has_derivative =
      c10::GradMode::is_enabled() && (A.requires_grad() || X.requires_grad());
  // Those of torch.func have no memory of their own.
  const auto is_wrapper = [](const at::Tensor& tensor) {
    return torchium::detail::levels_of(tensor).size() > 1;
  };
  return A.is_cuda() && A.layout() == at::kStrided && !has_derivative && X.device() == A.device() &&
         X.scalar_type() == A.scalar_type() && X.size(1) >= 2 &&
         X.size(1) <= cuda_kernels::kMostBlockRows && A.numel() > 0 && A.is_contiguous() &&
         X.mT().is_contiguous() && !A.is_neg() && !X.is_neg() &&
         (A.scalar_type() == at::kFloat || A.scalar_type() == at::kDouble) && !is_wrapper(A) &&
         !is_wrapper(X);
}

at::Tensor product_by_kernel(const at::Tensor& A, const at::Tensor& X) {
  torchium::detail::check_device_code(A.device());
  const c10::cuda::CUDAGuard device_guard(A.device());
  const at::Tensor rows = at::empty({X.size(1), A.size(0)}, X.options());
  AT_DISPATCH_FLOATING_TYPES(A.scalar_type(), "dense_product", [&] {
    cuda_kernels::row_block_product(A.const_data_ptr<scalar_t>(), X.const_data_ptr<scalar_t>(),
                                    rows.mutable_data_ptr<scalar_t>(), A.size(0), A.size(1),
                                    static_cast<int>(X.size(1)), c10::cuda::getCurrentCUDAStream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return rows.mT();
}
#endif

}  // namespace

at::Tensor dense_product(const at::Tensor& A, const at::Tensor& X) {
#ifdef TORCHIUM_WITH_CUDA
  if (has_kernel(A, X)) return product_by_kernel(A, X);
#endif
  // MKL's matrix product takes twice as long for one column.
  return X.size(1) == 1 ? at::mv(A, X.select(1, 0)).unsqueeze(1) : at::matmul(A, X);
}

}  // namespace torchium::linalg::detail
