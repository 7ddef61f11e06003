// The optimizers must derive their data again when parameters, state or options change. Each change
// is made to two optimizers; one of them is written to an archive and read again before every step,
// and so derives everything anew.
#include "optimizer_testing.h"
#include "torchium/optim/adagrad.h"
#include "torchium/optim/shampoo.h"

#include <functional>

namespace torchium::testing {
namespace {

using optim::Adagrad;
using optim::AdagradOptions;
using optim::Shampoo;
using optim::ShampooOptions;
using optim::ShampooParamState;
using Change = std::function<void(torch::optim::Optimizer&, Tensors&)>;

constexpr int kStepsBefore = 4, kStepsAfter = 5;

ShampooOptions shampoo_options() {
  return ShampooOptions(0.05).update_freq(3).block_size(4).betas({0.9, 0.99}).grafting("adam");
}

// A step of the parameters that require a gradient.
void step_once(torch::optim::Optimizer& optimizer, Tensors& params, int t) {
  auto generator = torch::make_generator<torch::CPUGeneratorImpl>(1000 + t);
  for (auto& param : params) {
    const auto noise = torch::randn(param.sizes(), generator, torch::kFloat);
    if (param.requires_grad()) {
      set_grad(param, param.detach() + noise.to(param.options().requires_grad(false)));
    } else {
      param.mutable_grad().reset();
    }
  }
  optimizer.step();
}

template <typename Optimizer, typename Options>
void expect_noticed(const Options& options, const Change& change, const char* what) {
  SCOPED_TRACE(what);
  const Tensors initial = odd_parameters();
  std::vector<Tensors> params{parameters_like(initial), parameters_like(initial)};
  std::vector<Tensors> results;
  for (const bool reloads : {false, true}) {
    Tensors& own = params[reloads ? 1 : 0];
    Optimizer optimizer(own, options);
    for (int t = 0; t < kStepsBefore + kStepsAfter; ++t) {
      if (t == kStepsBefore) {
        change(optimizer, own);
      }
      // Loading would restore the state that a change has replaced.
      if (reloads) {
        load(optimizer, saved(optimizer));
      }
      step_once(optimizer, own, t);
    }
    results.push_back(copies(own));
    const Tensors state = all_state(optimizer);
    results.back().insert(results.back().end(), state.begin(), state.end());
  }
  expect_equal(results[0], results[1]);
}

void replace_data(torch::optim::Optimizer&, Tensors& params) {
  for (auto& param : params) {
    param.set_data(param.detach().clone());
  }
}
void cast(torch::optim::Optimizer&, Tensors& params) {
  for (auto& param : params) {
    param.mutable_grad().reset();
    param.set_data(param.detach().to(torch::kDouble));
  }
}
void freeze(torch::optim::Optimizer&, Tensors& params) { params[0].requires_grad_(false); }
void add_group(torch::optim::Optimizer& optimizer, Tensors& params) {
  params.push_back(parameter(torch::full({6, 3}, 0.5)));
  static_cast<optim::SecondOrderOptimizer&>(optimizer).add_param_group(
      torch::optim::OptimizerParamGroup({params.back()}));
}
void erase_state(torch::optim::Optimizer& optimizer, Tensors& params) {
  optimizer.state().erase(params[0].unsafeGetTensorImpl());
}
void remove_parameter(torch::optim::Optimizer& optimizer, Tensors& params) {
  auto& group = optimizer.param_groups()[0].params();
  optimizer.state().erase(params.back().unsafeGetTensorImpl());
  group.pop_back();
  params.pop_back();
}

Change with_options(std::function<void(ShampooOptions&)> set) {
  return [set](torch::optim::Optimizer& optimizer, Tensors&) {
    set(static_cast<ShampooOptions&>(optimizer.param_groups()[0].options()));
  };
}

TEST(StepPlans, NoticeWhatChanges) {
  const std::vector<std::pair<const char*, Change>> changes{
      {"data", replace_data},     {"dtype", cast},         {"frozen", freeze},
      {"added group", add_group}, {"erased", erase_state}, {"removed parameter", remove_parameter}};
  for (const auto& [what, change] : changes) {
    expect_noticed<Shampoo>(shampoo_options(), change, what);
    expect_noticed<Adagrad>(AdagradOptions(0.1), change, what);
    expect_noticed<Adagrad>(AdagradOptions(0.1).full_matrix(true).block_size(4), change, what);
  }
}

TEST(StepPlans, NoticeOptions) {
  const std::vector<std::pair<const char*, std::function<void(ShampooOptions&)>>> changes{
      {"lr", [](auto& o) { o.lr(0.01); }},
      {"update_freq", [](auto& o) { o.update_freq(2); }},
      {"eps", [](auto& o) { o.eps(1e-2); }},
      {"exponent", [](auto& o) { o.exponent(-0.5); }},
      {"no average",
       [](auto& o) {
         o.betas({0.0, 0.99});
       }},
      {"momentum", [](auto& o) { o.momentum(0.9); }},
      {"grafting", [](auto& o) { o.grafting("sgd"); }},
      {"weight_decay", [](auto& o) { o.weight_decay(0.1); }},
      {"decoupled", [](auto& o) { o.weight_decay(0.1).decoupled_weight_decay(true); }},
      {"maximize", [](auto& o) { o.maximize(true); }},
      {"root_dtype", [](auto& o) { o.root_dtype("bfloat16"); }},
      {"capturable", [](auto& o) { o.capturable(true); }},
      {"graphs", [](auto& o) { o.graphs("never"); }}};
  for (const auto& [what, set] : changes) {
    expect_noticed<Shampoo>(shampoo_options(), with_options(set), what);
  }
}

// A state tensor that the caller has replaced is used from then on.
TEST(StepPlans, NoticeReplacedState) {
  const Tensors initial = odd_parameters();
  std::vector<Tensors> results;
  for (const bool replaces : {false, true}) {
    Tensors params = parameters_like(initial);
    Shampoo optimizer(params, shampoo_options());
    for (int t = 0; t < kStepsBefore + kStepsAfter; ++t) {
      if (t == kStepsBefore) {
        auto& state =
            static_cast<ShampooParamState&>(*optimizer.state().at(params[0].unsafeGetTensorImpl()));
        if (replaces) {
          const torch::Tensor old = state.exp_avg();
          state.exp_avg(torch::zeros_like(old));
          old.fill_(kNaN);  // nobody reads it any more
        } else {
          state.exp_avg().zero_();
        }
      }
      step_once(optimizer, params, t);
    }
    results.push_back(copies(params));
  }
  expect_equal(results[1], results[0]);
}

// Options that change while a parameter has no gradient.
TEST(StepPlans, NoticeOptionsOfIdleParameters) {
  using Set = std::function<void(ShampooOptions&)>;
  const std::vector<Set> changes{[](auto& o) { o.momentum(0.9); },
                                 [](auto& o) {
                                   o.grafting("rmsprop").betas({0.9, 1.0});
                                 }};
  for (const Set& set : changes) {
    const Tensors initial = odd_parameters();
    std::vector<Tensors> results;
    for (const bool reloads : {false, true}) {
      Tensors params = parameters_like(initial);
      Shampoo optimizer(params, ShampooOptions(0.05).update_freq(3).block_size(4));
      for (int t = 0; t < 8; ++t) {
        params[0].requires_grad_(t < 2 || t > 4);
        if (t == 2) {
          set(static_cast<ShampooOptions&>(optimizer.param_groups()[0].options()));
        }
        if (reloads && t > 2) {
          load(optimizer, saved(optimizer));
        }
        step_once(optimizer, params, t);
      }
      results.push_back(copies(params));
    }
    expect_equal(results[0], results[1]);
  }
}

TEST(StepPlans, DropAveragesOfIdleParameters) {
  Tensors params = parameters_like(odd_parameters());
  Shampoo optimizer(params, shampoo_options());
  auto& options = static_cast<ShampooOptions&>(optimizer.param_groups()[0].options());
  step_once(optimizer, params, 0);
  options.betas({0.0, 0.99});
  params[0].requires_grad_(false);
  step_once(optimizer, params, 1);
  params[0].requires_grad_(true);
  step_once(optimizer, params, 2);
  options.betas({0.9, 0.99});
  step_once(optimizer, params, 3);
  const auto& state =
      static_cast<ShampooParamState&>(*optimizer.state().at(params[0].unsafeGetTensorImpl()));
  EXPECT_EQ(state.exp_avg_start().item<double>(), 2.0);
}

// A sum of squares is not an average of them.
TEST(StepPlans, BeginAnotherKindOfSecondMomentAfresh) {
  const Tensors initial = odd_parameters();
  std::vector<Tensors> results;
  for (const bool by_hand : {false, true}) {
    Tensors params = parameters_like(initial);
    Shampoo optimizer(params, shampoo_options());
    for (int t = 0; t < kStepsBefore + kStepsAfter; ++t) {
      if (t == kStepsBefore) {
        static_cast<ShampooOptions&>(optimizer.param_groups()[0].options()).grafting("adagrad");
        for (const auto& param : params) {
          auto& state =
              static_cast<ShampooParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
          if (by_hand) {
            state.grafting_second_moment().reset();
          }
        }
      }
      step_once(optimizer, params, t);
    }
    results.push_back(copies(params));
  }
  expect_equal(results[0], results[1]);
}

}  // namespace
}  // namespace torchium::testing
