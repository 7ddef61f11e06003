#include "optim/parameter_vectors.h"

#include <ATen/ATen.h>

namespace torchium::optim::detail {

at::Tensor dots(at::TensorList x, at::TensorList y) {
  std::vector<at::Tensor> sums;
  for (size_t p = 0; p < x.size(); ++p) {
    // The sum of products is pairwise, where a dot product would add them up one by one.
    sums.push_back((x[p] * y[p]).sum().to(at::kDouble));
  }
  return at::stack(sums);
}

at::Tensor dot(at::TensorList x, at::TensorList y) { return dots(x, y).sum(); }

void add_scaled_(ParameterVector& x, at::TensorList y, const at::Tensor& scale) {
  for (size_t p = 0; p < x.size(); ++p) {
    x[p].addcmul_(y[p], scale.to(x[p].scalar_type()));
  }
}

}  // namespace torchium::optim::detail
