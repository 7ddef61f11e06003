// The state of one parameter of an optimizer without layer calls: tensors under the keys of
// checkpoints.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// dtype of all state of a parameter except `step`: float64 for float64 parameters, else float32.
at::ScalarType state_dtype(const at::Tensor& param);

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// The tensor under `key`; null: none.
const at::Tensor* find_tensor(const NamedTensors& tensors, const std::string& key);

// i for the key "<list>.i"; none for another key.
std::optional<size_t> index_in_list(std::string_view key, std::string_view list);

// Members are named as their keys (docs/design.md). Undefined or empty: absent.
struct ParameterState {
  at::Tensor step;
  std::vector<at::Tensor> statistics, roots, root_failures;  // one per slot
  at::Tensor diagonal, exp_avg, grafting_second_moment, momentum_buffer;
  at::Tensor exp_avg_start, grafting_second_moment_start;
  at::Tensor sum;
  at::Tensor hessian_diagonal, exp_hessian_diag_sq;

  ParameterState() = default;
  // Ignores unknown keys.
  explicit ParameterState(const NamedTensors& tensors);

  bool is_empty() const { return !step.defined(); }

  // The defined tensors.
  NamedTensors named() const;
  // Whether both hold the same tensor objects.
  bool is_same(const ParameterState& other) const;
};

// State of the parameter's shape that an option may need at any time.
struct StateBuffer {
  const char* key;
  at::Tensor ParameterState::*tensor;
  at::Tensor ParameterState::*start;  // `step` when the average began; null: not an average
};
inline constexpr StateBuffer kStateBuffers[] = {
    {"exp_avg", &ParameterState::exp_avg, &ParameterState::exp_avg_start},
    {"grafting_second_moment", &ParameterState::grafting_second_moment,
     &ParameterState::grafting_second_moment_start},
    {"momentum_buffer", &ParameterState::momentum_buffer, nullptr}};

using StateList = std::vector<ParameterState>;

// One member of each state.
std::vector<at::Tensor> list_of(const StateList& states, at::Tensor ParameterState::*member);

// State that is created. On the device "meta" only its shape counts, and PyTorch would compute
// zeros and identities in Python.

// Zeros with the shape and memory format of the parameter, in its state dtype.
at::Tensor parameter_shaped_zeros(const at::Tensor& param);
// [count, n, n], each with its own memory.
at::Tensor identities(int64_t count, int64_t n, const at::TensorOptions& options);

}  // namespace torchium::optim::detail
