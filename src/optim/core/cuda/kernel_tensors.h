// Tensors as the kernels of a step read them. CUDA builds only.
#pragma once

#include "cuda_kernels/optimizer_step/step_control.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace torchium::optim::detail {

cuda_kernels::ElementType element_type(at::ScalarType type);
bool same_layout(const at::Tensor& tensor, const at::Tensor& param);
// Four elements of `tensor`, which may be undefined, can be read at once.
bool aligned_to_four(const at::Tensor& tensor);
// Lets autograd know that a kernel has written to `tensor`, which may be undefined.
void note_change(const at::Tensor& tensor);
// Null if it is undefined.
float* floats(const at::Tensor& tensor);

// Whether the kernels can read the gradient: it is dense, and in float32 or 16 bits and in the
// layout of its parameter if they update that.
bool is_readable(const at::Tensor& grad, const at::Tensor& param, bool is_updated);
// Whether it is a matrix with gaps between its rows alone, in float32 or 16 bits.
bool has_rows_apart(const at::Tensor& tensor);
// A copy that they can read.
at::Tensor readable_gradient(const at::Tensor& grad, const at::Tensor& param, bool is_updated);

// One parameter in the tables of the kernels.
struct TablePlace {
  size_t param, entry;
  bool by_fours;  // four of its elements may be read at once, whatever the gradient
};
// A gradient as far as the arguments of kernels depend on it.
struct GradientKind {
  cuda_kernels::ElementType type;
  bool is_aligned;  // to four elements

  uint8_t in_key() const {
    return static_cast<uint8_t>(2 * static_cast<int>(type) + (is_aligned ? 1 : 0));
  }
};
template <typename Entry>
void set_gradient(Entry& entry, GradientKind kind, bool by_fours) {
  entry.grad_type = kind.type;
  entry.by_fours = by_fours && kind.is_aligned;
}

// The learning rate in a type that the kernels read, which must live until they are launched.
at::Tensor readable_learning_rate(const at::Tensor& lr);
cuda_kernels::LearningRate learning_rate(const at::Tensor& readable);

}  // namespace torchium::optim::detail
