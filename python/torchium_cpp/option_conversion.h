// Options, parameter groups and optimizers from what Python passes.
#pragma once

#include "bindings.h"
#include "optim/core/options.h"
#include "torchium/optim/capturing_optimizer.h"
#include "torchium/optim/schedules.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace torchium::python {

using OptionDict = py::typing::Dict<py::str, py::object>;

// A Python function of the step. It may be called, and copied, without the interpreter's lock.
inline optim::Schedule schedule_from(const py::object& function) {
  using Result = std::variant<std::monostate, int64_t, double>;
  const auto call = function.cast<std::function<Result(int64_t)>>();
  return [call](int64_t step) {
    return std::visit(
        [](const auto& value) {
          if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::monostate>) {
            return c10::IValue();
          } else {
            return c10::IValue(value);
          }
        },
        call(step));
  };
}

// `base` with the options of `values`. Raises TypeError for an unknown name or a wrong type.
template <typename Options>
Options with_options(Options base, const py::dict& values) {
  size_t used = 0;
  optim::detail::for_each_option(base, [&](const auto& option) {
    if (!values.contains(option.name)) {
      return;
    }
    ++used;
    if constexpr (requires { base.schedules(); }) {
      if (py::isinstance<py::function>(values[option.name])) {
        base.schedules()[option.name] = schedule_from(values[option.name]);
        return;
      }
    }
    try {
      option.value = values[option.name].template cast<std::decay_t<decltype(option.value)>>();
    } catch (const py::cast_error&) {
      throw py::type_error(std::string("option '") + option.name + "' has a wrong type: " +
                           py::repr(values[option.name]).template cast<std::string>());
    }
  });
  if (used != values.size()) {
    std::string known;
    optim::detail::for_each_option(base, [&](const auto& option) {
      known += (known.empty() ? "" : ", ") + std::string(option.name);
    });
    throw py::type_error("unknown option in " + py::repr(values).cast<std::string>() +
                         "; the options are " + known);
  }
  return base;
}

template <typename Options>
torch::optim::OptimizerParamGroup make_group(const py::dict& group, const Options& defaults) {
  if (!group.contains("params")) {
    throw py::value_error("a parameter group needs the key 'params'");
  }
  std::vector<at::Tensor> params;
  for (const auto& param : group["params"].cast<py::iterable>()) {
    params.push_back(param.cast<at::Tensor>());
  }
  py::dict options;
  for (const auto& [key, value] : group) {
    if (!key.equal(py::str("params"))) {
      options[key] = value;
    }
  }
  return torch::optim::OptimizerParamGroup(
      std::move(params), std::make_unique<Options>(with_options(defaults, options)));
}

using Groups = py::typing::Iterable<py::typing::Union<at::Tensor, OptionDict>>;

// `params`: tensors, or dicts of parameter groups.
template <typename Optimizer, typename Options>
std::unique_ptr<Optimizer> make_optimizer(const Groups& params,
                                          const py::KWArgs<py::object>& options) {
  const Options defaults = with_options(Options(), options);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  const py::list items(params);
  if (!items.empty() && py::isinstance<py::dict>(items[0])) {
    for (const auto& item : items) {
      groups.push_back(make_group(item.cast<py::dict>(), defaults));
    }
  } else {
    py::dict group;
    group["params"] = items;
    groups.push_back(make_group(group, defaults));
  }
  if constexpr (std::is_base_of_v<optim::CapturingOptimizer, Optimizer>) {
    // Uses of the parameters are seen in Python too; their names are not known.
    return std::make_unique<Optimizer>(torch::nn::Module(), groups, defaults);
  } else {
    return std::make_unique<Optimizer>(groups, defaults);
  }
}

}  // namespace torchium::python
