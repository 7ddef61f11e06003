// Checks of optimizer options: c10::ValueError naming the option, its value and what is allowed.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

namespace torchium::optim::detail {

inline void check_at_least_zero(const char* name, double value) {
  TORCH_CHECK_VALUE(std::isfinite(value) && value >= 0.0, name,
                    " must be a finite number of at least 0, got ", value);
}

// A decay or momentum rate in [0, 1), or in [0, 1].
inline void check_rate(const char* name, double value, bool one_allowed) {
  TORCH_CHECK_VALUE(value >= 0.0 && (value < 1.0 || (one_allowed && value == 1.0)), name,
                    " must be in [0, 1", one_allowed ? ']' : ')', ", got ", value);
}

inline void check_at_least_one(const char* name, int64_t value) {
  TORCH_CHECK_VALUE(value >= 1, name, " must be at least 1, got ", value);
}

inline void check_positive(const char* name, double value) {
  TORCH_CHECK_VALUE(std::isfinite(value) && value > 0.0, name,
                    " must be a finite number above 0, got ", value);
}

inline void check_positive_or_none(const char* name, const std::optional<double>& value) {
  TORCH_CHECK_VALUE(!value || (std::isfinite(*value) && *value > 0.0), name,
                    " must be a finite number above 0, or none, got ", *value);
}

inline void check_choice(const char* name, const std::string& value,
                         std::initializer_list<std::string_view> choices) {
  if (std::find(choices.begin(), choices.end(), value) != choices.end()) {
    return;
  }
  std::string allowed;
  for (const auto choice : choices) {
    allowed += (allowed.empty() ? "'" : ", '") + std::string(choice) + "'";
  }
  TORCH_CHECK_VALUE(false, name, " must be one of ", allowed, ", got '", value, "'");
}

}  // namespace torchium::optim::detail
