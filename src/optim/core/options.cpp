#include "optim/core/options.h"

#include "distributed/communicator.h"

#include <charconv>
#include <cmath>
#include <sstream>

namespace torchium::optim {

void SharedOptions::set_ranks(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  ranks_ = distributed::communicator_of(group);
}

namespace detail {

bool Number::accepts(double value) const {
  return std::isfinite(value) && (without_low ? value > low : value >= low) &&
         (with_high ? value <= high : value < high);
}

std::string Number::requirement() const {
  std::ostringstream text;
  text << "a finite number in " << (without_low ? '(' : '[') << low << ", " << high
       << (with_high ? ']' : ')');
  return text.str();
}

void check_learning_rate(double value) {
  TORCH_CHECK_VALUE(kLearningRate.accepts(value), "lr must be ", kLearningRate.requirement(),
                    ", got ", text_of(value));
}

// The shortest digits that give the same number again.
std::string text_of(double value) {
  std::array<char, 32> digits{};
  const auto result = std::to_chars(digits.data(), digits.data() + digits.size(), value);
  std::string text(digits.data(), result.ptr);
  const bool is_whole = text.find_first_not_of("-0123456789") == std::string::npos;
  return is_whole ? text + ".0" : text;
}

std::string text_of(int64_t value) { return std::to_string(value); }
std::string text_of(bool value) { return value ? "True" : "False"; }
std::string text_of(const std::string& value) { return "'" + value + "'"; }

}  // namespace detail
}  // namespace torchium::optim
