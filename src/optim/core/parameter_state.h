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

// The tensor under `key`; null: there is none.
const at::Tensor* find_tensor(const NamedTensors& tensors, const std::string& key);

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

  // The tensors that are there.
  NamedTensors named() const;
  // Whether both hold the very same tensors.
  bool is_same(const ParameterState& other) const;
};

// State of the parameter's shape that an option may need at any time.
struct StateBuffer {
  const char* key;
  at::Tensor ParameterState::*tensor;
  at::Tensor ParameterState::*start;  // `step` when an average began; null: it is none
};
inline constexpr StateBuffer kStateBuffers[] = {
    {"exp_avg", &ParameterState::exp_avg, &ParameterState::exp_avg_start},
    {"grafting_second_moment", &ParameterState::grafting_second_moment,
     &ParameterState::grafting_second_moment_start},
    {"momentum_buffer", &ParameterState::momentum_buffer, nullptr}};

using StateList = std::vector<ParameterState>;

// One member of all states.
std::vector<at::Tensor> list_of(const StateList& states, at::Tensor ParameterState::*member);

// Zeros with the shape and memory format of the parameter, in its state dtype.
at::Tensor parameter_shaped_zeros(const at::Tensor& param);

}  // namespace torchium::optim::detail
