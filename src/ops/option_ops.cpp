// The lists of options (optim/core/options.h) for the Python face: registration, no maths.

#include "ops/option_ops.h"

#include "optim/core/option_fields.h"

#include <ATen/core/ivalue.h>
#include <torch/library.h>

#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace torchium::ops {
namespace {

using optim::ShampooOptions;
using optim::detail::for_each_option;
using Strings = std::vector<std::string>;

// visit(options) with the defaults of an optimizer.
template <typename Visitor>
auto with_defaults(const std::string& optimizer, Visitor&& visit) {
  if (optimizer == "Shampoo") {
    return visit(ShampooOptions());
  }
  if (optimizer == "Adagrad") {
    return visit(optim::AdagradOptions());
  }
  if (optimizer == "KFAC") {
    return visit(optim::KFACOptions());
  }
  TORCH_CHECK_VALUE(optimizer == "NaturalGradient", "no optimizer is called ", optimizer);
  return visit(optim::NaturalGradientOptions());
}

template <typename Options>
Options with_values(Options options, const c10::IValue& values) {
  const auto& elements = values.toTupleRef().elements();
  for_each_option(options, [&](const auto& option) {
    for (size_t i = 0; i + 1 < elements.size(); i += 2) {
      if (elements[i].toStringRef() == option.name) {
        option.value = elements[i + 1].to<std::decay_t<decltype(option.value)>>();
      }
    }
  });
  return options;
}

// Of each option its name, its type and what it may be; then the names of those that must be the
// same in all groups.
std::tuple<Strings, Strings, Strings, Strings> option_fields(std::string optimizer) {
  Strings names, kinds, requirements, shared;
  with_defaults(optimizer, [&](const auto& options) {
    for_each_option(options, [&](const auto& option) {
      names.emplace_back(option.name);
      kinds.push_back(optim::detail::kind_of(option.value));
      requirements.push_back(optim::detail::requirement_of(option.value, option.requirement));
      if ((option.traits & optim::detail::kSameInAllGroups) != 0) {
        shared.emplace_back(option.name);
      }
    });
  });
  return {std::move(names), std::move(kinds), std::move(requirements), std::move(shared)};
}

// Defaults as a tuple of names and values in turns.
c10::IValue default_options(std::string optimizer) {
  std::vector<c10::IValue> values;
  with_defaults(optimizer, [&](const auto& options) {
    for_each_option(options, [&](const auto& option) {
      values.emplace_back(option.name);
      values.emplace_back(option.value);
    });
  });
  return c10::ivalue::Tuple::create(std::move(values));
}

// Empty, or the name of the first option that is wrong and what it must be. Throws c10::ValueError
// for options that are wrong together.
Strings wrong_option(std::string optimizer, const c10::IValue& values) {
  return with_defaults(optimizer, [&](const auto& defaults) -> Strings {
    const auto options = with_values(defaults, values);
    if (const auto wrong = optim::detail::find_wrong_option(options)) {
      return {wrong->name, wrong->requirement};
    }
    check_combination(options);
    return {};
  });
}

// What ShampooOptions::from_adamw() has beside AdamW's own options, as default_options().
c10::IValue options_beside_adamw() {
  static const std::set<std::string> of_adamw{"lr", "betas", "eps", "weight_decay", "grafting_eps"};
  std::vector<c10::IValue> values;
  for_each_option(ShampooOptions::from_adamw(), ShampooOptions(),
                  [&](const auto& option, const auto& usual) {
                    if (!(option.value == usual.value) && of_adamw.count(option.name) == 0) {
                      values.emplace_back(option.name);
                      values.emplace_back(option.value);
                    }
                  });
  return c10::ivalue::Tuple::create(std::move(values));
}

}  // namespace

std::shared_ptr<const torch::optim::OptimizerOptions> options_from(const std::string& optimizer,
                                                                   const c10::IValue& values) {
  return with_defaults(optimizer, [&](const auto& defaults) {
    using Options = std::decay_t<decltype(defaults)>;
    return std::shared_ptr<const torch::optim::OptimizerOptions>(
        std::make_shared<Options>(with_values(defaults, values)));
  });
}

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  m.def("option_fields", option_fields);
  m.def("default_options", default_options);
  m.def("wrong_option", wrong_option);
  m.def("options_beside_adamw", options_beside_adamw);
}

}  // namespace torchium::ops
