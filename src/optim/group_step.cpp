#include "optim/group_step.h"

#include "optim/stacks.h"

#include <ATen/ATen.h>

namespace torchium::optim::detail {

MatrixLists matrix_lists(const std::vector<MatrixParamState*>& states) {
  MatrixLists lists;
  const auto append = [](std::vector<at::Tensor>& list, const std::vector<at::Tensor>& slots) {
    list.insert(list.end(), slots.begin(), slots.end());
  };
  for (const auto* state : states) {
    append(lists.statistics, state->statistics());
    append(lists.roots, state->roots());
    append(lists.root_failures, state->root_failures());
  }
  return lists;
}

at::Tensor parameter_shaped_zeros(const at::Tensor& param) {
  return at::zeros_like(param, param.options().dtype(state_dtype(param)).requires_grad(false));
}

}  // namespace torchium::optim::detail
