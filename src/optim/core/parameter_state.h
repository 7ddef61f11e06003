// The state of one parameter of Shampoo or Adagrad, as the optimizer classes of both languages keep
// it: tensors under the keys of checkpoints.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

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

using StateList = std::vector<const ParameterState*>;

// One member of all states.
std::vector<at::Tensor> list_of(const StateList& states, at::Tensor ParameterState::*member);
// The same of those that have it.
std::vector<at::Tensor> defined_list_of(const StateList& states,
                                        at::Tensor ParameterState::*member);
// Slots of all states, in (parameter, slot) order.
std::vector<at::Tensor> slots_of(const StateList& states,
                                 std::vector<at::Tensor> ParameterState::*member);
// What `step` was when an average began, 0 where that is not there; empty if no state has it.
std::vector<at::Tensor> starts_of(const StateList& states, at::Tensor ParameterState::*member);

}  // namespace torchium::optim::detail
