#include "optim/core/schedules.h"

namespace torchium::optim::detail {

std::optional<double> value_as(const c10::IValue& value, double) {
  if (value.isInt()) {
    return static_cast<double>(value.toInt());
  }
  return value.isDouble() ? std::optional(value.toDouble()) : std::nullopt;
}

std::optional<int64_t> value_as(const c10::IValue& value, int64_t) {
  return value.isInt() ? std::optional(value.toInt()) : std::nullopt;
}

}  // namespace torchium::optim::detail
