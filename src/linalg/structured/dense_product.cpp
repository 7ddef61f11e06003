#include "linalg/structured/dense_product.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mv.h>
#include <c10/core/GradMode.h>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/krylov/row_block_product.h"
#include "cuda_kernels/krylov/symmetric_block_product.h"
#include "support/alignment.h"
#include "support/derivatives.h"
#include "support/device_code.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::linalg::detail {
namespace {

#ifdef TORCHIUM_WITH_CUDA
// A [n, n] and the columns of X are contiguous, without derivatives.
bool can_have_kernel(const at::Tensor& A, const at::Tensor& X) {
  const bool has_derivative =
      c10::GradMode::is_enabled() && (A.requires_grad() || X.requires_grad());
  // Those of torch.func have no memory of their own.
  const auto is_wrapper = [](const at::Tensor& tensor) {
    return torchium::detail::levels_of(tensor).size() > 1;
  };
  return A.is_cuda() && A.layout() == at::kStrided && !has_derivative && X.device() == A.device() &&
         X.scalar_type() == A.scalar_type() && X.size(1) <= cuda_kernels::kMostBlockRows &&
         A.numel() > 0 && A.is_contiguous() && X.mT().is_contiguous() && !A.is_neg() &&
         !X.is_neg() && (A.scalar_type() == at::kFloat || A.scalar_type() == at::kDouble) &&
         !is_wrapper(A) && !is_wrapper(X);
}

bool has_kernel(const at::Tensor& A, const at::Tensor& X) {
  return X.size(1) >= 2 && can_have_kernel(A, X);
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

// Smaller matrices stay in the L2 cache, and give each processor few tiles.
constexpr int64_t kLeastSymmetricOrder = 6144;

bool has_symmetric_kernel(const at::Tensor& A, const at::Tensor& X) {
  if (A.size(0) < kLeastSymmetricOrder || A.size(0) % 4 != 0 || A.scalar_type() != at::kFloat ||
      X.size(1) == 0 || !can_have_kernel(A, X) || !torchium::detail::is_aligned(A) ||
      !torchium::detail::is_aligned(X)) {
    return false;
  }
  const cudaDeviceProp* device = at::cuda::getDeviceProperties(A.get_device());
  return cuda_kernels::has_symmetric_block_product(
      device->major, device->minor, static_cast<int>(device->sharedMemPerBlockOptin));
}

at::Tensor symmetric_product_by_kernel(const at::Tensor& A, const at::Tensor& X) {
  torchium::detail::check_device_code(A.device());
  const c10::cuda::CUDAGuard device_guard(A.device());
  const at::Tensor rows = at::empty({X.size(1), A.size(0)}, X.options());
  int64_t numbers = 0;
  C10_CUDA_CHECK(cuda_kernels::symmetric_block_product_workspace(A.size(0), numbers));
  const at::Tensor workspace = at::empty({numbers}, X.options());
  C10_CUDA_CHECK(
      cuda_kernels::symmetric_block_product({.A = A.const_data_ptr<float>(),
                                             .X = X.const_data_ptr<float>(),
                                             .Y = rows.mutable_data_ptr<float>(),
                                             .n = A.size(0),
                                             .count = static_cast<int>(X.size(1)),
                                             .workspace = workspace.mutable_data_ptr<float>()},
                                            c10::cuda::getCurrentCUDAStream()));
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

at::Tensor symmetric_dense_product(const at::Tensor& A, const at::Tensor& X) {
#ifdef TORCHIUM_WITH_CUDA
  if (has_symmetric_kernel(A, X)) return symmetric_product_by_kernel(A, X);
#endif
  return dense_product(A, X);
}

std::optional<at::Tensor> dense_product_from_left(const at::Tensor& X, const at::Tensor& A) {
  if (!A.is_cpu()) {
    return std::nullopt;
  }
  return A.dim() == 2 && X.dim() == 2 && X.size(0) == 1
             ? at::mv(A.mT(), X.select(0, 0)).unsqueeze(0)
             : at::matmul(X, A);
}

}  // namespace torchium::linalg::detail
