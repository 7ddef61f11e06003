#ifdef TORCHIUM_WITH_CUDA
#include "optim/core/cuda/kernel_tensors.h"

#include "linalg/common/element_type.h"

#include <ATen/ops/empty_like.h>

namespace torchium::optim::detail {

bool same_layout(const at::Tensor& tensor, const at::Tensor& param) {
  return (tensor.is_contiguous() && param.is_contiguous()) || tensor.strides() == param.strides();
}

bool aligned_to_four(const at::Tensor& tensor) {
  return !tensor.defined() || reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) %
                                      (4 * static_cast<uintptr_t>(tensor.element_size())) ==
                                  0;
}

void note_change(const at::Tensor& tensor) {
  if (tensor.defined()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

float* floats(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr;
}

at::Tensor readable_learning_rate(const at::Tensor& lr) {
  return lr.scalar_type() == at::kDouble ? lr : lr.to(at::kFloat);
}

cuda_kernels::LearningRate learning_rate(const at::Tensor& lr) {
  return {lr.is_cpu() ? nullptr : lr.const_data_ptr(), lr.scalar_type() == at::kDouble,
          lr.is_cpu() ? lr.item<double>() : 0.0};
}

cuda_kernels::ElementType element_type(at::ScalarType type) {
  return linalg::detail::element_type(type).value_or(cuda_kernels::ElementType::kFloat);
}

bool is_readable(const at::Tensor& grad, const at::Tensor& param, bool is_updated) {
  return is_updated ? grad.scalar_type() != at::kDouble && same_layout(grad, param)
                    : grad.is_non_overlapping_and_dense();
}

bool has_rows_apart(const at::Tensor& tensor) {
  return tensor.dim() == 2 && tensor.stride(1) == 1 && tensor.stride(0) > tensor.size(1) &&
         tensor.scalar_type() != at::kDouble;
}

at::Tensor readable_gradient(const at::Tensor& grad, const at::Tensor& param, bool is_updated) {
  if (!is_updated) {
    return grad.contiguous();
  }
  return at::empty_like(param, grad.options().dtype(at::kFloat)).copy_(grad);
}

}  // namespace torchium::optim::detail
#endif
