// Evaluates the options that are functions of the step.
#pragma once

#include "optim/core/options.h"
#include "torchium/optim/schedules.h"

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// None: it is of another type. Integers are numbers too.
std::optional<double> value_as(const c10::IValue& value, double);
std::optional<int64_t> value_as(const c10::IValue& value, int64_t);
template <typename T>
requires requires { value_as(c10::IValue(), T()); }
std::optional<std::optional<T>> value_as(const c10::IValue& value, const std::optional<T>&) {
  if (value.isNone()) {
    return std::optional<T>();
  }
  const auto present = value_as(value, T());
  return present ? std::optional(present) : std::nullopt;
}

// "damping, TCov and TInv"
template <typename Options>
std::string names_of_scheduled(const Options& options) {
  std::string names;
  for_each_option(options, [&](const auto& option) {
    if ((option.traits & kScheduled) != 0) {
      names += (names.empty() ? "" : ", ") + std::string(option.name);
    }
  });
  return names;
}

// ValueError for an option that cannot be a function of the step.
template <typename Options>
void check_schedules(const Options& options) {
  for (const auto& [name, function] : options.schedules()) {
    bool known = false;
    for_each_option(options, [&, &name = name](const auto& option) {
      known |= name == option.name && (option.traits & kScheduled) != 0;
    });
    TORCH_CHECK_VALUE(known, "schedules has '", name, "'; the options that may be functions are ",
                      names_of_scheduled(options));
    TORCH_CHECK_VALUE(function != nullptr, "schedules has no function for '", name, "'");
  }
}

// The options with the values that their functions have at this step of the group; options that are
// the same in all groups, at the last of their steps: a group may have joined later.
template <typename Options>
Options at_step(const Options& options, int64_t group_step, int64_t last_step) {
  check_schedules(options);
  Options result = options;
  for_each_option(result, [&](const auto& option) {
    if ((option.traits & kScheduled) == 0) {
      return;
    }
    const auto function = options.schedules().find(option.name);
    if (function == options.schedules().end()) {
      return;
    }
    if constexpr (requires { value_as(c10::IValue(), option.value); }) {
      const int64_t step = (option.traits & kSameInAllGroups) == 0 ? group_step : last_step;
      const c10::IValue returned = function->second(step);
      const auto value = value_as(returned, option.value);
      TORCH_CHECK_VALUE(value && !find_wrong(option.name, *value, option.requirement), option.name,
                        " must be ", requirement_of(option.value, option.requirement), ", got ",
                        value ? text_of(*value) : c10::str(returned),
                        ", which its function returned for step ", step, "; change the function");
      option.value = *value;
    }
  });
  return result;
}

// Sets the options of all groups to the values of their functions. next_steps(): the step of each
// group, wanted only if there are functions.
template <typename Options, typename Steps>
void follow_schedules(const char* optimizer, std::vector<torch::optim::OptimizerParamGroup>& groups,
                      Steps&& next_steps) {
  std::vector<Options> values;
  std::vector<int64_t> steps;
  for (auto& group : groups) {
    auto* options = dynamic_cast<Options*>(&group.options());
    if (options == nullptr) {
      return;  // check_options() raises
    }
    if (!options->schedules().empty() && steps.empty()) {
      steps = next_steps();
    }
    const size_t index = values.size();
    values.push_back(options->schedules().empty()
                         ? *options
                         : at_step(*options, steps[index], *std::ranges::max_element(steps)));
  }
  if (steps.empty()) {
    return;
  }
  std::vector<const torch::optim::OptimizerOptions*> all;
  for (const Options& options : values) {
    all.push_back(&options);
  }
  check_same_in_all<Options>(optimizer, all);
  for (size_t g = 0; g < groups.size(); ++g) {
    static_cast<Options&>(groups[g].options()) = std::move(values[g]);
  }
}

}  // namespace torchium::optim::detail
