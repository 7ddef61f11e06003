// Lists of tensors, one per segment of the parameters, as one long vector.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::optim::detail {

using ParameterVector = std::vector<at::Tensor>;

// Tensors x_s times numbers; no tensors mean zero.
struct ScaledVector {
  ParameterVector x;
  std::vector<double> scales;
};

// <x_s, y_s> of every segment s: float64 [segments]. On the CPU all products and sums are
// float64, and the same for any number of threads.
at::Tensor dots(at::TensorList x, at::TensorList y);
// <x, y>: 0-dim float64.
at::Tensor dot(at::TensorList x, at::TensorList y);

// x <- x + scale y, for a 0-dim `scale` of any dtype.
void add_scaled_(ParameterVector& x, at::TensorList y, const at::Tensor& scale);
// x <- x + y
void add_(ParameterVector& x, const ScaledVector& y);

}  // namespace torchium::optim::detail
