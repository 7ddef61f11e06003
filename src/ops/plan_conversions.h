// Conversions between the arguments of the plans and the types of torch.classes.
#pragma once

#include "optim/core/parameter_state.h"
#include "optim/core/state_memory.h"
#include "optim/core/step_monitor.h"

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace torchium::ops {

using optim::detail::NamedTensors;
using Dict = c10::Dict<std::string, at::Tensor>;
// Group (0 for a joint plan), consecutive skips, the parameter of the last one, consecutive failed
// roots, their parameter.
using Failure =
    std::tuple<int64_t, int64_t, std::optional<at::Tensor>, int64_t, std::optional<at::Tensor>>;

inline NamedTensors named(const Dict& dict) {
  NamedTensors tensors;
  for (const auto& entry : dict) {
    tensors.emplace_back(entry.key(), entry.value());
  }
  return tensors;
}

inline std::vector<NamedTensors> named(const std::vector<Dict>& dicts) {
  std::vector<NamedTensors> all;
  for (const Dict& dict : dicts) {
    all.push_back(named(dict));
  }
  return all;
}

inline Dict dict_of(const NamedTensors& tensors) {
  Dict dict;
  for (const auto& [key, tensor] : tensors) {
    dict.insert(key, tensor);
  }
  return dict;
}

// A learning rate as the plans take it: 0-dim, float64 on the CPU, or any float on `device`.
inline at::Tensor learning_rate_on(const at::Tensor& tensor, c10::Device device) {
  const at::Tensor lr = tensor.detach().reshape({});
  return lr.is_cpu() ? lr.to(at::kDouble) : lr.to(device, /*non_blocking=*/!device.is_cpu());
}

using NamedNumbers = c10::Dict<std::string, int64_t>;

inline void insert_all(NamedNumbers& numbers, const optim::detail::NamedBytes& named) {
  for (const auto& [name, value] : named) {
    numbers.insert(name, value);
  }
}

inline NamedNumbers numbers_of(const optim::GroupMemory& group) {
  NamedNumbers numbers;
  insert_all(numbers, optim::detail::numbers_of(group));
  insert_all(numbers, optim::detail::numbers_of(group.state));
  return numbers;
}

// Memory of each group, of what is common, and of all; name, group and state of each parameter; the
// table.
using MemoryNumbers =
    std::tuple<std::vector<NamedNumbers>,
               std::vector<std::tuple<std::string, int64_t, NamedNumbers>>, std::string>;

inline MemoryNumbers numbers_of(const optim::MemoryReport& report) {
  std::vector<NamedNumbers> groups;
  for (const optim::GroupMemory& group : report.groups) {
    groups.push_back(numbers_of(group));
  }
  groups.push_back(numbers_of(report.joint));
  groups.push_back(numbers_of(report.total()));
  std::vector<std::tuple<std::string, int64_t, NamedNumbers>> parameters;
  for (const optim::ParameterMemory& parameter : report.parameters) {
    NamedNumbers state;
    insert_all(state, optim::detail::numbers_of(parameter.state));
    parameters.emplace_back(parameter.name, static_cast<int64_t>(parameter.group), state);
  }
  return {std::move(groups), std::move(parameters), c10::str(report)};
}

inline Failure failure_of(size_t group, const optim::detail::StepReport& report) {
  const auto defined = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  const auto& entries = report.entries;
  return {static_cast<int64_t>(group), entries[optim::detail::kConsecutiveSkips],
          defined(report.non_finite_parameter), entries[optim::detail::kConsecutiveRootFailures],
          defined(report.failed_parameter)};
}

}  // namespace torchium::ops
