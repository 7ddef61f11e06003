// The state of one parameter of Shampoo or Adagrad, as the optimizer classes of both languages keep
// it: tensors under the keys of checkpoints.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// dtype of all state of a parameter but `step`: float64 for float64 parameters, else float32.
at::ScalarType state_dtype(const at::Tensor& param);

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Undefined or empty: not there. Members as their keys say (docs/design.md).
struct ParameterState {
  at::Tensor step;
  std::vector<at::Tensor> statistics, roots, root_failures;  // one a slot
  at::Tensor diagonal, exp_avg, grafting_second_moment, momentum_buffer;
  at::Tensor exp_avg_start, grafting_second_moment_start;
  at::Tensor sum;

  ParameterState() = default;
  // Leaves out keys of other code.
  explicit ParameterState(const NamedTensors& tensors);

  bool is_empty() const { return !step.defined(); }

  // Calls visit(tensor) for each that is there.
  template <typename Visitor>
  void for_each(Visitor&& visit) const {
    for (const auto* slots : {&statistics, &roots, &root_failures}) {
      for (const at::Tensor& slot : *slots) {
        visit(slot);
      }
    }
    for (const at::Tensor* tensor :
         {&step, &diagonal, &exp_avg, &grafting_second_moment, &momentum_buffer, &exp_avg_start,
          &grafting_second_moment_start, &sum}) {
      if (tensor->defined()) {
        visit(*tensor);
      }
    }
  }
};

std::vector<at::Tensor> steps_of(const std::vector<ParameterState>& states);

}  // namespace torchium::optim::detail
