// The options (optim/core/options.h) and the keys of the state for Python: registration, no maths.

#include "ops/option_ops.h"

#include "optim/adagrad/adagrad_options.h"
#include "optim/adahessian/adahessian_options.h"
#include "optim/kfac/kfac_options.h"
#include "optim/kfac/kfac_preconditioner_options.h"
#include "optim/natural_gradient/natural_gradient_options.h"
#include "optim/shampoo/shampoo_options.h"

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
  if (optimizer == "AdaHessian") {
    return visit(optim::AdaHessianOptions());
  }
  if (optimizer == "KFAC") {
    return visit(optim::KFACOptions());
  }
  if (optimizer == "KFACPreconditioner") {
    return visit(optim::KFACPreconditionerOptions());
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

// Names, types and requirements of the options; names of those that may be functions of the step,
// and of those that are the same in all groups.
std::tuple<Strings, Strings, Strings, Strings, Strings> option_fields(std::string optimizer) {
  Strings names, kinds, requirements, scheduled, shared;
  with_defaults(optimizer, [&](const auto& options) {
    for_each_option(options, [&](const auto& option) {
      names.emplace_back(option.name);
      kinds.push_back(optim::detail::kind_of(option.value));
      requirements.push_back(optim::detail::requirement_of(option.value, option.requirement));
      if ((option.traits & optim::detail::kScheduled) != 0) {
        scheduled.emplace_back(option.name);
      }
      if ((option.traits & optim::detail::kSameInAllGroups) != 0) {
        shared.emplace_back(option.name);
      }
    });
  });
  return {std::move(names), std::move(kinds), std::move(requirements), std::move(scheduled),
          std::move(shared)};
}

// Defaults, as a tuple of alternating names and values.
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

// The name and requirement of the first wrong option; empty: none. Throws c10::ValueError for
// options that contradict each other.
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

// Throws c10::ValueError if an option that must be the same in all groups differs.
void check_same_in_all(std::string optimizer, const c10::IValue& groups) {
  with_defaults(optimizer, [&](const auto& defaults) {
    using Options = std::decay_t<decltype(defaults)>;
    std::vector<Options> options;
    std::vector<const torch::optim::OptimizerOptions*> pointers;
    options.reserve(groups.toTupleRef().size());
    for (const c10::IValue& values : groups.toTupleRef().elements()) {
      pointers.push_back(&options.emplace_back(with_values(defaults, values)));
    }
    optim::detail::check_same_in_all<Options>(optimizer.c_str(), pointers);
  });
}

// The keys of the state of all optimizers. Those of a list have a number behind a dot.
Strings state_keys() {
  std::set<std::string> keys;
  const auto add = [&](optim::SecondOrderParamState&& state) {
    for (const auto& member : state.members()) {
      keys.insert(member.first);
    }
    for (const auto& list : state.lists()) {
      keys.insert(list.first);
    }
  };
  add(optim::ShampooParamState());
  add(optim::AdagradParamState());
  add(optim::AdaHessianParamState());
  add(optim::KFACParamState());
  add(optim::NaturalGradientParamState());
  return {keys.begin(), keys.end()};
}

// The options of ShampooOptions::from_adamw() that AdamW does not have, as default_options().
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

// eps and grafting_eps of ShampooOptions::from_adamw().
std::tuple<double, double> options_of_adamw(double eps, bool amsgrad) {
  const auto options =
      ShampooOptions::from_adamw(torch::optim::AdamWOptions().eps(eps).amsgrad(amsgrad));
  return {options.eps(), options.grafting_eps()};
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
  m.def("options_of_adamw", options_of_adamw);
  m.def("check_same_in_all", check_same_in_all);
  m.def("state_keys", state_keys);
}

}  // namespace torchium::ops
