// The optimizers must derive their data again when parameters, state or options change. Each change
// is made to two optimizers; one of them is written to an archive and read again before every step,
// and so derives everything again.
#include "model_testing.h"
#include "torchium/optim/adagrad.h"
#include "torchium/optim/adahessian.h"
#include "torchium/optim/kfac.h"
#include "torchium/optim/natural_gradient.h"
#include "torchium/optim/shampoo.h"

#include <functional>
#include <set>

namespace torchium::testing {
namespace {

using optim::Adagrad;
using optim::AdagradOptions;
using optim::AdaHessian;
using optim::AdaHessianOptions;
using optim::KFAC;
using optim::KFACOptions;
using optim::MatrixParamState;
using optim::NaturalGradient;
using optim::NaturalGradientOptions;
using optim::SecondOrderParamState;
using optim::Shampoo;
using optim::ShampooOptions;
using optim::ShampooParamState;
using torch::optim::OptimizerParamGroup;

constexpr int kStepsBefore = 4, kStepsAfter = 5;

ShampooOptions planned_options() {
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

// Parameters with gradients that are set by hand, and others that are not the optimizer's.
template <typename Kind>
struct Parameters {
  using Optimizer = Kind;
  Tensors params = odd_parameters();
  Tensors others{parameter(torch::full({6, 3}, 0.5))};

  template <typename Options>
  Optimizer make(const Options& options) {
    return Optimizer(params, options);
  }
  void step(Optimizer& optimizer, int t) { step_once(optimizer, params, t); }
};

// The same with a loss, whose gradients have a graph.
template <typename Kind>
struct Differentiated : Parameters<Kind> {
  void step(Kind& optimizer, int t) {
    auto generator = torch::make_generator<torch::CPUGeneratorImpl>(1000 + t);
    torch::Tensor loss = torch::zeros({}, torch::kDouble);
    optimizer.zero_grad();
    for (auto& param : this->params) {
      const auto noise = torch::randn(param.sizes(), generator, torch::kDouble);
      if (param.requires_grad()) {
        const auto w = param.to(torch::kDouble);
        loss = loss + (w.square() + 0.5 * w.cos() + noise * w).sum();
      } else {
        param.mutable_grad().reset();
      }
    }
    torch::manual_seed(t);  // of the random signs
    loss.backward({}, /*keep_graph=*/true, /*create_graph=*/true);
    optimizer.step();
    optimizer.zero_grad();
  }
};

// The same of a model.
template <typename Kind>
struct Model {
  using Optimizer = Kind;
  nn::Sequential model = make_mlp(torch::kFloat);
  Tensors params = model->parameters();
  Tensors others{params[4], params[5]};

  Model() { params.resize(4); }
  template <typename Options>
  Optimizer make(const Options& options) {
    return Optimizer(*model, {OptimizerParamGroup(params)}, options);
  }
  void step(Optimizer& optimizer, int t) {
    train_on(optimizer, model, make_batch(t, kMlpSample, 6, params[0].scalar_type()));
  }
};

template <typename Trained>
using ChangeOf = std::function<void(typename Trained::Optimizer&, Trained&)>;

template <typename Trained, typename Options>
void expect_noticed(const Options& options, const ChangeOf<Trained>& change, const char* what,
                    bool starts_frozen = false) {
  SCOPED_TRACE(what);
  std::vector<Tensors> results;
  for (const bool reloads : {false, true}) {
    Trained trained;
    trained.params[0].requires_grad_(!starts_frozen);
    auto optimizer = trained.make(options);
    for (int t = 0; t < kStepsBefore + kStepsAfter; ++t) {
      if (t == kStepsBefore) {
        change(optimizer, trained);
      }
      // Loading would restore the state that a change has replaced.
      if (reloads) {
        load(optimizer, saved(optimizer));
      }
      trained.step(optimizer, t);
    }
    results.push_back(copies(trained.params));
    for (const Tensors& more : {copies(trained.others), all_state(optimizer)}) {
      results.back().insert(results.back().end(), more.begin(), more.end());
    }
  }
  expect_equal(results[0], results[1]);
}

void replace_data(Tensors& params) {
  for (auto& param : params) {
    param.set_data(param.detach().clone());
  }
}
void replace_strides(Tensors& params) {
  for (auto& param : params) {
    if (param.dim() > 1) {
      param.set_data(param.detach().transpose(0, 1).contiguous().transpose(0, 1));
    }
  }
}
void cast(Tensors& params) {
  for (auto& param : params) {
    param.mutable_grad().reset();
    param.set_data(param.detach().to(torch::kDouble));
  }
}

void assign(SecondOrderParamState& state, const std::string& key, const torch::Tensor& old,
            const torch::Tensor& fresh) {
  if (state.assign(key, fresh)) {
    return;
  }
  auto& matrices = static_cast<MatrixParamState&>(state);
  for (auto* list : {&matrices.statistics(), &matrices.roots(), &matrices.root_failures()}) {
    for (auto& tensor : *list) {
      tensor = tensor.is_same(old) ? fresh : tensor;
    }
  }
}

// New tensors for all of the state, or new memory for the same tensors. Nobody reads the old values
// any more.
void replace_state(const torch::optim::Optimizer& optimizer, const Tensors& params,
                   bool keeps_tensors) {
  for (const auto& param : params) {
    auto& state =
        static_cast<SecondOrderParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
    for (auto& [key, tensor] : state.tensors()) {
      const bool counts = !tensor.is_floating_point() || key == "step" || key == "factor_updates";
      const torch::Tensor old = tensor.detach(), fresh = counts ? old.clone() : 1.5 * old;
      if (keeps_tensors) {
        tensor.set_data(fresh);
      } else {
        assign(state, key, tensor, fresh);
      }
      if (old.is_floating_point()) {
        old.fill_(kNaN);
      }
    }
  }
}

// What no plan may miss; not those in `except`.
template <typename Trained, typename Options>
void expect_all_noticed(const Options& options, const std::set<std::string>& except = {}) {
  const std::vector<std::pair<const char*, ChangeOf<Trained>>> changes{
      {"data", [](auto&, auto& trained) { replace_data(trained.params); }},
      {"strides", [](auto&, auto& trained) { replace_strides(trained.params); }},
      {"dtype",
       [](auto&, auto& trained) {
         cast(trained.params);
         cast(trained.others);
       }},
      {"state",
       [](auto& optimizer, auto& trained) { replace_state(optimizer, trained.params, false); }},
      {"memory of state",
       [](auto& optimizer, auto& trained) { replace_state(optimizer, trained.params, true); }},
      {"frozen", [](auto&, auto& trained) { trained.params[0].requires_grad_(false); }},
      {"thawed", [](auto&, auto& trained) { trained.params[0].requires_grad_(true); }},
      {"added group",
       [](auto& optimizer, auto& trained) {
         optimizer.add_param_group(OptimizerParamGroup(trained.others));
         trained.params.insert(trained.params.end(), trained.others.begin(), trained.others.end());
       }},
      {"erased",
       [](auto& optimizer, auto& trained) {
         optimizer.state().erase(trained.params[0].unsafeGetTensorImpl());
       }},
      {"removed parameter", [](auto& optimizer, auto& trained) {
         optimizer.state().erase(trained.params.back().unsafeGetTensorImpl());
         optimizer.param_groups()[0].params().pop_back();
         trained.others.push_back(trained.params.back());
         trained.params.pop_back();
       }}};
  for (const auto& [what, change] : changes) {
    if (except.count(what) == 0) {
      expect_noticed<Trained>(options, change, what, std::string(what) == "thawed");
    }
  }
}

template <typename Trained, typename Options>
void expect_options_noticed(
    const Options& options,
    const std::vector<std::pair<const char*, std::function<void(Options&)>>>& changes) {
  for (const auto& [what, set] : changes) {
    const auto change = [set = set](auto& optimizer, auto&) {
      set(static_cast<Options&>(optimizer.param_groups()[0].options()));
    };
    expect_noticed<Trained>(options, change, what);
  }
}

TEST(StepPlans, NoticeWhatChanges) {
  expect_all_noticed<Parameters<Shampoo>>(planned_options().momentum(0.9));
  expect_all_noticed<Parameters<Adagrad>>(AdagradOptions(0.1));
  expect_all_noticed<Parameters<Adagrad>>(AdagradOptions(0.1).full_matrix(true).block_size(4));
  expect_all_noticed<Differentiated<AdaHessian>>(AdaHessianOptions(0.01).update_each(2));
}

TEST(StepPlans, OfLayersNoticeWhatChanges) {
  const auto kfac = KFACOptions(0.02).TCov(2).TInv(3).weight_decay(0.01);
  expect_all_noticed<Model<KFAC>>(kfac);
  expect_all_noticed<Model<KFAC>>(KFACOptions(kfac).damping_split("exact"));
  expect_all_noticed<Model<KFAC>>(KFACOptions(kfac).damping_split("exact").ekfac(true));
  const auto natural = NaturalGradientOptions(0.1).damping(0.1);
  expect_all_noticed<Model<NaturalGradient>>(natural);
  // A batch that is kept does not follow these.
  expect_all_noticed<Model<NaturalGradient>>(NaturalGradientOptions(natural).update_freq(3),
                                             {"memory of state", "removed parameter"});
}

TEST(StepPlans, OfLayersNoticeOptions) {
  expect_options_noticed<Model<KFAC>, KFACOptions>(
      KFACOptions(0.02).TCov(2).TInv(3),
      {{"lr", [](auto& o) { o.lr(0.01); }},
       {"momentum", [](auto& o) { o.momentum(0.0); }},
       {"damping", [](auto& o) { o.damping(0.1); }},
       {"stat_decay", [](auto& o) { o.stat_decay(0.5); }},
       {"TCov", [](auto& o) { o.TCov(1); }},
       {"TInv", [](auto& o) { o.TInv(1); }},
       {"kl_clip", [](auto& o) { o.kl_clip(1e-5); }},
       {"damping_split", [](auto& o) { o.damping_split("exact"); }},
       {"ekfac", [](auto& o) { o.damping_split("exact").ekfac(true); }}});
  expect_options_noticed<Model<NaturalGradient>, NaturalGradientOptions>(
      NaturalGradientOptions(0.1).damping(0.1).update_freq(3),
      {{"lr", [](auto& o) { o.lr(0.01); }},
       {"momentum", [](auto& o) { o.momentum(0.0); }},
       {"damping", [](auto& o) { o.damping(0.2); }},
       {"solver", [](auto& o) { o.solver("cg"); }},
       {"max_norm", [](auto& o) { o.max_norm(0.01); }}});
}

TEST(StepPlans, NoticeOptions) {
  expect_options_noticed<Parameters<Shampoo>, ShampooOptions>(
      planned_options(),
      {{"lr", [](auto& o) { o.lr(0.01); }},
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
       {"graphs", [](auto& o) { o.graphs("never"); }}});
  expect_options_noticed<Differentiated<AdaHessian>, AdaHessianOptions>(
      AdaHessianOptions(0.01).update_each(2),
      {{"lr", [](auto& o) { o.lr(0.02); }},
       {"betas",
        [](auto& o) {
          o.betas({0.5, 0.9});
        }},
       {"eps", [](auto& o) { o.eps(1e-2); }},
       {"weight_decay", [](auto& o) { o.weight_decay(0.1); }},
       {"hessian_power", [](auto& o) { o.hessian_power(0.5); }},
       {"update_each", [](auto& o) { o.update_each(1); }},
       {"n_samples", [](auto& o) { o.n_samples(2); }},
       {"graphs", [](auto& o) { o.graphs("never"); }}});
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
  Shampoo optimizer(params, planned_options());
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

// A sum of squares is not an average of them. Some parameters have no gradient when the option
// changes.
TEST(StepPlans, BeginAnotherKindOfSecondMomentAfresh) {
  const Tensors initial = odd_parameters();
  std::vector<Tensors> results;
  for (const bool by_hand : {false, true}) {
    Tensors params = parameters_like(initial);
    Shampoo optimizer(params, planned_options());
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
      params[0].requires_grad_(t < kStepsBefore || t > kStepsBefore + 1);
      step_once(optimizer, params, t);
    }
    results.push_back(copies(params));
  }
  expect_equal(results[0], results[1]);
}

}  // namespace
}  // namespace torchium::testing
