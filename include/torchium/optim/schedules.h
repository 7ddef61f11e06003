// Options that are functions of the step.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace torchium::optim {

/// An option as a function of the step, which is 1 for the first: 1 + the largest number of steps
/// that a parameter of the group (for kl_clip: of any group) has taken. Skipped steps do not count.
/// The function returns what the option takes: a double, an integer, or std::nullopt for none.
///
/// It is called when the group is added (with 1), and before each step at least once: where the
/// next capture is decided, at the end of the step before, and at the beginning of step(). A value
/// that the option does not allow throws c10::ValueError, and changes nothing. The option of the
/// group holds the last value, and archives store that. They do not store functions: an optimizer
/// that loads one keeps its own.
using Schedule = std::function<c10::IValue(int64_t step)>;

/// Functions by the name of the option:
///
///     options.schedules({{"damping", [](int64_t step) { return 0.1 / step; }}});
using Schedules = std::map<std::string, Schedule>;

}  // namespace torchium::optim
