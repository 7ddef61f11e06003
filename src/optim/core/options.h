// Lists of options: their elements, and everything that is done with all options of an optimizer.
//
// Each optimizer has one list, the function option_fields(options) in its *_options.h. An element
// has the name in both languages and archives, the public member, whose initializer is the default,
// and the requirement for its value. Checks, comparison and archives follow from the list.
#pragma once

#include "torchium/optim/options.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---- requirements: accepts(value), and requirement(), the text after "must be"

// A finite number in [low, high).
struct Number {
  double low = 0.0;
  double high = kInfinity;
  bool without_low = false;
  bool with_high = false;

  bool accepts(double value) const;
  std::string requirement() const;
};
// A decay or a momentum.
constexpr Number kRate{.high = 1.0};
constexpr Number kRateOrOne{.high = 1.0, .with_high = true};
constexpr Number kPositive{.without_low = true};
// A step computes in float32 unless the parameter is float64.
constexpr Number kLearningRate{.high = std::numeric_limits<float>::max(), .with_high = true};

struct Integer {
  int64_t low = 1;

  bool accepts(int64_t value) const { return value >= low; }
  std::string requirement() const { return "an integer of at least " + std::to_string(low); }
};

struct Flag {
  bool accepts(bool) const { return true; }
  std::string requirement() const { return "True or False"; }
};

template <size_t N>
struct Choice {
  std::array<const char*, N> choices;

  bool accepts(std::string_view value) const {
    for (const std::string_view choice : choices) {
      if (value == choice) {
        return true;
      }
    }
    return false;
  }
  std::string requirement() const {
    std::string text = N > 1 ? "one of " : "";
    for (const std::string choice : choices) {
      text += (choice == choices[0] ? "'" : ", '") + choice + "'";
    }
    return text;
  }
};
template <typename... Choices>
constexpr Choice<sizeof...(Choices)> one_of(Choices... choices) {
  return {{choices...}};
}
constexpr auto kRootMethods = one_of("auto", "eigh", "newton");
constexpr auto kGraphModes = one_of("auto", "always", "never");
constexpr auto kDampingSplits = one_of("pi", "plain", "exact");

struct NumberPair {
  Number first, second;

  std::string requirement() const { return "a pair of numbers"; }
};

template <size_t N>
struct ChoicePair {
  Choice<N> each;

  std::string requirement() const { return "a pair of names, each " + each.requirement(); }
};
template <size_t N>
ChoicePair(Choice<N>) -> ChoicePair<N>;

// ---- one option

enum OptionTraits : uint8_t {
  kPlain = 0,
  kShapesState = 1,  // the state of a parameter, or its shapes, depend on it
  kSameInAllGroups = 2,
  kScheduled = 4,  // may be a function of the step; every planned step reads it again
};
constexpr OptionTraits operator|(OptionTraits a, OptionTraits b) {
  return static_cast<OptionTraits>(static_cast<uint8_t>(a) | static_cast<uint8_t>(b));
}

template <typename T, typename Requirement>
struct Option {
  const char* name;
  T& value;
  Requirement requirement;
  OptionTraits traits = kPlain;
};
template <typename T, typename Requirement>
Option(const char*, T&, Requirement) -> Option<T, Requirement>;
template <typename T, typename Requirement>
Option(const char*, T&, Requirement, OptionTraits) -> Option<T, Requirement>;

// Calls visit(option) for each.
template <typename Options, typename Visitor>
void for_each_option(Options& options, Visitor&& visit) {
  std::apply([&](const auto&... option) { (visit(option), ...); }, option_fields(options));
}

// Calls visit(a, b) for each option of both.
template <typename Options, typename Visitor>
void for_each_option(const Options& a, const Options& b, Visitor&& visit) {
  const auto visit_all = [&](const auto&... of_a) {
    std::apply([&](const auto&... of_b) { (visit(of_a, of_b), ...); }, option_fields(b));
  };
  std::apply(visit_all, option_fields(a));
}

// A value in messages: 0.5, 'eigh', True, None.
std::string text_of(double value);
std::string text_of(int64_t value);
std::string text_of(bool value);
std::string text_of(const std::string& value);
template <typename T>
std::string text_of(const std::optional<T>& value) {
  return value ? text_of(*value) : "None";
}
template <typename T>
std::string text_of(const std::tuple<T, T>& value) {
  return c10::str("(", text_of(std::get<0>(value)), ", ", text_of(std::get<1>(value)), ")");
}

// The type of a value, as the Python interface names it.
inline std::string kind_of(double) { return "float"; }
inline std::string kind_of(int64_t) { return "int"; }
inline std::string kind_of(bool) { return "bool"; }
inline std::string kind_of(const std::string&) { return "str"; }
template <typename T>
std::string kind_of(const std::tuple<T, T>&) {
  return "pair of " + kind_of(T());
}
template <typename T>
std::string kind_of(const std::optional<T>&) {
  return kind_of(T()) + "?";
}

template <typename T, typename Requirement>
std::string requirement_of(const T&, const Requirement& requirement) {
  return requirement.requirement();
}
template <typename T, typename Requirement>
std::string requirement_of(const std::optional<T>&, const Requirement& requirement) {
  return "None or " + requirement.requirement();
}

// ---- checks

// Options of an optimizer; ValueError for those of another.
template <typename Options>
const Options& options_as(const torch::optim::OptimizerOptions& options, const char* optimizer) {
  const auto* result = dynamic_cast<const Options*>(&options);
  TORCH_CHECK_VALUE(result != nullptr, "a parameter group of ", optimizer, " needs ", optimizer,
                    "Options");
  return *result;
}

// "`name` must be `requirement`, got `value`"
struct WrongOption {
  std::string name, requirement, value;
};

template <typename T, typename Requirement>
std::optional<WrongOption> find_wrong(const std::string& name, const T& value,
                                      const Requirement& requirement) {
  return requirement.accepts(value)
             ? std::nullopt
             : std::optional(WrongOption{name, requirement.requirement(), text_of(value)});
}
inline std::optional<WrongOption> find_wrong(const std::string& name,
                                             const std::tuple<double, double>& value,
                                             const NumberPair& pair) {
  auto wrong = find_wrong(name + "[0]", std::get<0>(value), pair.first);
  return wrong ? wrong : find_wrong(name + "[1]", std::get<1>(value), pair.second);
}
template <size_t N>
std::optional<WrongOption> find_wrong(const std::string& name,
                                      const std::tuple<std::string, std::string>& value,
                                      const ChoicePair<N>& pair) {
  auto wrong = find_wrong(name + "[0]", std::get<0>(value), pair.each);
  return wrong ? wrong : find_wrong(name + "[1]", std::get<1>(value), pair.each);
}
template <typename T, typename Requirement>
std::optional<WrongOption> find_wrong(const std::string& name, const std::optional<T>& value,
                                      const Requirement& requirement) {
  auto wrong = value ? find_wrong(name, *value, requirement) : std::nullopt;
  if (wrong) {
    wrong->requirement = requirement_of(value, requirement);
  }
  return wrong;
}

void check_learning_rate(double value);

template <typename Options>
std::optional<WrongOption> find_wrong_option(const Options& options) {
  std::optional<WrongOption> wrong;
  for_each_option(options, [&](const auto& option) {
    if (!wrong) {
      wrong = find_wrong(option.name, option.value, option.requirement);
    }
  });
  return wrong;
}

// Throws c10::ValueError for a wrong option or combination of options.
template <typename Options>
void check_options(const Options& options) {
  const auto wrong = find_wrong_option(options);
  TORCH_CHECK_VALUE(!wrong, wrong->name, " must be ", wrong->requirement, ", got ", wrong->value);
  check_combination(options);
}

// Whether the option is a function of the step.
template <typename Options>
bool has_function(const Options& options, const char* name) {
  if constexpr (requires { options.schedules(); }) {
    return options.schedules().count(name) != 0;
  }
  return false;
}

// Throws c10::ValueError if an option that must be the same in all groups differs. Without
// compares_functions those that are functions of the step in both groups do not count.
template <typename Options>
void check_same_in_all(const char* optimizer,
                       const std::vector<const torch::optim::OptimizerOptions*>& groups,
                       bool compares_functions = true) {
  for (size_t group = 1; group < groups.size(); ++group) {
    const auto& first = static_cast<const Options&>(*groups[0]);
    const auto& other = static_cast<const Options&>(*groups[group]);
    for_each_option(first, other, [&](const auto& a, const auto& b) {
      const bool counts =
          (a.traits & kSameInAllGroups) != 0 &&
          (compares_functions || !has_function(first, a.name) || !has_function(other, a.name));
      TORCH_CHECK_VALUE(!counts || a.value == b.value, a.name,
                        " must be the same in all parameter groups of ", optimizer, ", got ",
                        text_of(a.value), " in group 0 and ", text_of(b.value), " in group ",
                        group);
    });
  }
}

// ---- comparison

// Whether only the learning rate differs, and options with one of the traits `others`.
template <typename Options>
bool equal_but_lr(const Options& lhs, const Options& rhs, OptionTraits others = kPlain) {
  bool equal = true;
  for_each_option(lhs, rhs, [&](const auto& a, const auto& b) {
    equal &= a.value == b.value || std::string_view(a.name) == "lr" || (a.traits & others) != 0;
  });
  return equal;
}

template <typename Options>
bool equal_options(const Options& lhs, const Options& rhs) {
  return lhs.lr() == rhs.lr() && equal_but_lr(lhs, rhs);
}

// Name and value of each option with kShapesState.
using OptionTexts = std::vector<std::pair<std::string, std::string>>;
template <typename Options>
OptionTexts options_of_state(const Options& options) {
  OptionTexts texts;
  for_each_option(options, [&](const auto& option) {
    if ((option.traits & kShapesState) != 0) {
      texts.emplace_back(option.name, text_of(option.value));
    }
  });
  return texts;
}

// ---- archives

template <typename Options>
void write_options(torch::serialize::OutputArchive& archive, const Options& options) {
  for_each_option(
      options, [&](const auto& option) { archive.write(option.name, c10::IValue(option.value)); });
}

// Options that the archive lacks, for example one of an earlier version, keep their values.
template <typename Options>
void read_options(torch::serialize::InputArchive& archive, Options& options) {
  std::vector<std::string> unknown = archive.keys();
  for_each_option(options, [&](const auto& option) {
    std::erase(unknown, option.name);
    c10::IValue saved;
    if (archive.try_read(option.name, saved)) {
      option.value = saved.to<std::decay_t<decltype(option.value)>>();
    }
  });
  TORCH_CHECK_VALUE(unknown.empty(), "the archive has the option '", unknown.front(),
                    "'; it was not written by this kind of optimizer");
}

}  // namespace torchium::optim::detail

// Instantiated once for each optimizer.
namespace torchium::optim {

template <typename Derived>
void OptionsOf<Derived>::check() const {
  detail::check_options(static_cast<const Derived&>(*this));
}
template <typename Derived>
bool OptionsOf<Derived>::equals_but_lr(const torch::optim::OptimizerOptions& other) const {
  return detail::equal_but_lr(static_cast<const Derived&>(*this),
                              static_cast<const Derived&>(other));
}
template <typename Derived>
void OptionsOf<Derived>::serialize(torch::serialize::InputArchive& archive) {
  detail::read_options(archive, static_cast<Derived&>(*this));
}
template <typename Derived>
void OptionsOf<Derived>::serialize(torch::serialize::OutputArchive& archive) const {
  detail::write_options(archive, static_cast<const Derived&>(*this));
}
template <typename Derived>
double OptionsOf<Derived>::get_lr() const {
  return static_cast<const Derived&>(*this).lr();
}
template <typename Derived>
void OptionsOf<Derived>::set_lr(const double lr) {
  static_cast<Derived&>(*this).lr(lr);
}
template <typename Derived>
bool OptionsOf<Derived>::equals(const Derived& other) const {
  return detail::equal_options(static_cast<const Derived&>(*this), other);
}

}  // namespace torchium::optim
