// Changes between two steps (dtypes, options, shapes), numbers that are too large, and archives
// with impossible numbers.
#include "model_testing.h"
#include "torchium/optim/adagrad.h"
#include "torchium/optim/kfac.h"
#include "torchium/optim/natural_gradient.h"
#include "torchium/optim/shampoo.h"

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <type_traits>

namespace torchium::testing {
namespace {

using optim::Adagrad;
using optim::AdagradOptions;
using optim::KFAC;
using optim::KFACOptions;
using optim::KFACParamState;
using optim::NaturalGradient;
using optim::NaturalGradientOptions;
using optim::Shampoo;
using optim::ShampooOptions;
using optim::ShampooParamState;

double step_of(const torch::optim::Optimizer& optimizer, const torch::Tensor& param) {
  return state_tensors(optimizer, param).front().second.item<double>();
}

bool all_finite(const Tensors& tensors) {
  for (const auto& tensor : tensors) {
    if (!tensor.isfinite().all().item<bool>()) {
      return false;
    }
  }
  return true;
}

// ---- large numbers

TEST(HugeGradients, SkipTheStepAndAreNamed) {
  for (const auto& [dtype, huge, text] :
       {std::tuple{torch::kFloat, 1e20, "too large to square in float32 (above"},
        std::tuple{torch::kDouble, 1e155, "too large to square in float64 (above"}}) {
    auto params = odd_parameters(dtype);
    Shampoo shampoo(params, ShampooOptions(0.1).grafting("sgd"));
    Adagrad adagrad(params);
    for (torch::optim::Optimizer* optimizer :
         std::initializer_list<torch::optim::Optimizer*>{&shampoo, &adagrad}) {
      train(*optimizer, params, 0, 2);
      const auto state = all_state(*optimizer);
      const auto values = copies(params);
      params[3].mutable_grad().view(-1)[0] = huge;
      optimizer->step();
      optimizer->step();
      expect_contains(message_of<c10::Error>([&] { optimizer->step(); }), text);
      expect_equal(all_state(*optimizer), state);
      expect_equal(copies(params), values);
      train(*optimizer, params, 2, 3);
      EXPECT_TRUE(all_finite(all_state(*optimizer)));
    }
  }
}

TEST(HugeGradients, OfLayersSkipTheStep) {
  auto model = make_mlp(torch::kFloat);
  KFAC kfac(*model);
  NaturalGradient natural(*model, NaturalGradientOptions(0.1).damping(0.1));
  const auto values = copies(model->parameters());
  const auto batch = make_batch(0, kMlpSample, 6, torch::kFloat);
  for (auto* optimizer : std::initializer_list<optim::SecondOrderOptimizer*>{&kfac, &natural}) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      optimizer->zero_grad();
      (cross_entropy(model->forward(batch.inputs), batch.targets) * 1e25).backward();
      optimizer->step();
    }
    expect_equal(copies(model->parameters()), values);
  }
}

TEST(HugeGradients, TheLimitIsThatOfTheElementsAndSteps) {
  auto param = parameter(torch::ones({40, 25}));
  Adagrad optimizer({param});
  for (int step = 1; step < 4; ++step) {
    const double limit = std::sqrt(std::numeric_limits<float>::max() / (32.0 * 1000 * step));
    set_grad(param, torch::full({40, 25}, 1.001 * limit));
    optimizer.step();
    EXPECT_EQ(step_of(optimizer, param), step - 1);
    set_grad(param, torch::full({40, 25}, 0.999 * limit));
    optimizer.step();
    EXPECT_EQ(step_of(optimizer, param), step);
    EXPECT_TRUE(all_finite(all_state(optimizer)));
  }
}

TEST(HugeGradients, TheLimitFollowsAPenaltyThatIsSetLater) {
  auto param = parameter(torch::ones({40, 25}));
  Shampoo optimizer({param}, ShampooOptions(0.1).grafting("sgd"));
  train(optimizer, {param}, 0, 1);
  const double limit = std::sqrt(std::numeric_limits<float>::max() / (32.0 * 1000 * 2));
  options_of<ShampooOptions>(optimizer).weight_decay(0.1);  // which takes half of the limit
  set_grad(param, torch::full({40, 25}, 0.6 * limit));
  optimizer.step();
  EXPECT_EQ(step_of(optimizer, param), 1);
  options_of<ShampooOptions>(optimizer).weight_decay(0.0);
  optimizer.step();
  EXPECT_EQ(step_of(optimizer, param), 2);
}

TEST(HugeGradients, APenaltyLimitsTheParameterToo) {
  const double limit = std::sqrt(std::numeric_limits<float>::max() / (32.0 * 1000)) / 2 / 1e-3;
  for (const double share : {0.999, 1.001}) {
    auto param = parameter(torch::full({40, 25}, share * limit));
    Adagrad adagrad({param}, AdagradOptions(0.0).weight_decay(1e-3));
    set_grad(param, torch::ones({40, 25}));
    adagrad.step();
    EXPECT_EQ(step_of(adagrad, param), share < 1.0 ? 1 : 0);
    EXPECT_TRUE(all_finite(all_state(adagrad)));
  }
}

TEST(HugeGradients, AreNamedWithTheLimitOfTheirStep) {
  auto param = parameter(torch::ones({50}));
  Adagrad optimizer({param});
  train(optimizer, {param}, 0, 3);
  set_grad(param, torch::full({50}, 1e30));
  const auto skip_three = [&] {
    for (int attempt = 0; attempt < 3; ++attempt) {
      optimizer.step();
    }
  };
  // sqrt(3.4e38 / (32 * 50 * 4))
  expect_contains(message_of<c10::Error>(skip_three),
                  "in float32 (above 2.3e+17) and were skipped");
}

TEST(HugeUpdates, StopAtTheLargestNumber) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kFloat}) {
    auto param = parameter(torch::full({3, 2}, 60000.0).to(dtype));
    Shampoo optimizer({param}, ShampooOptions(1e38).momentum(0.9));
    for (int step = 0; step < 3; ++step) {
      set_grad(param, -torch::ones({3, 2}).to(dtype));
      optimizer.step();
    }
    EXPECT_TRUE(all_finite({param})) << dtype;
    EXPECT_TRUE(all_finite(all_state(optimizer))) << dtype;
  }
}

// ---- dtypes

TEST(CastModels, TakeTheirStateAlong) {
  auto params = odd_parameters();
  const auto all =
      ShampooOptions(0.1).betas({0.9, 0.99}).momentum(0.9).grafting("adam").block_size(4);
  Shampoo optimizer(params, all);
  train(optimizer, params, 0, 3);
  Tensors doubles;
  for (const auto& param : params) {
    doubles.push_back(parameter(param.detach().to(torch::kDouble)));
  }
  Shampoo other(doubles, all);
  load(other, saved(optimizer));
  for (auto& param : params) {
    param.set_data(param.detach().to(torch::kDouble));
    param.mutable_grad().reset();
  }
  train(optimizer, params, 3, 6);
  train(other, doubles, 3, 6);
  expect_equal(copies(params), copies(doubles));
  expect_equal(all_state(optimizer), all_state(other));
}

template <typename Optimizer, typename Options>
void expect_state_to_follow(const Options& options) {
  auto model = make_mlp(torch::kFloat);
  Optimizer optimizer(*model, options);
  for (int step = 0; step < 3; ++step) {
    train_on(optimizer, model, make_batch(step, kMlpSample, 6, torch::kFloat));
  }
  model->to(torch::kDouble);
  for (int step = 3; step < 6; ++step) {
    train_on(optimizer, model, make_batch(step, kMlpSample));
  }
  EXPECT_EQ(step_of(optimizer, model->parameters()[0]), 6);
  EXPECT_TRUE(all_finite(copies(model->parameters())));
}

TEST(CastModels, OfLayersTakeTheirStateAlong) {
  expect_state_to_follow<KFAC>(KFACOptions(0.01).TCov(2));
  expect_state_to_follow<KFAC>(KFACOptions(0.01).TCov(2).damping_split("exact"));
  expect_state_to_follow<NaturalGradient>(NaturalGradientOptions(0.1).damping(0.1).momentum(0.5));
  expect_state_to_follow<NaturalGradient>(NaturalGradientOptions(0.1).damping(0.1).update_freq(2));
}

// Also where a parameter becomes one later.
template <typename Optimizer>
void expect_float8_refused() {
  const auto make = [](const nn::Sequential& model) {
    if constexpr (std::is_base_of_v<optim::CapturingOptimizer, Optimizer>) {
      return Optimizer(*model);
    } else {
      return Optimizer(model->parameters());
    }
  };
  auto model = make_mlp(torch::kFloat);
  auto optimizer = make(model);
  for (int step = 0; step < 2; ++step) {
    train_on(optimizer, model, make_batch(step, kMlpSample, 6, torch::kFloat));
  }
  auto weight = model->parameters()[2];
  const auto before = weight.detach().clone();
  weight.mutable_grad().reset();
  weight.set_data(before.to(torch::kFloat8_e4m3fn));
  set_grad(weight, weight.detach());
  const auto state = all_state(optimizer);
  const std::string refusal = "parameter 2 of group 0 (shape [4, 7]) has dtype float8_e4m3fn";
  expect_contains(message_of<c10::ValueError>([&] { optimizer.step(); }), refusal);
  expect_contains(message_of<c10::ValueError>([&] { make(model); }), refusal);
  expect_equal(all_state(optimizer), state);
  weight.mutable_grad().reset();
  weight.set_data(before);
  train_on(optimizer, model, make_batch(2, kMlpSample, 6, torch::kFloat));
}

TEST(Float8Parameters, AreRefused) {
  expect_float8_refused<Shampoo>();
  expect_float8_refused<Adagrad>();
  expect_float8_refused<KFAC>();
  expect_float8_refused<NaturalGradient>();
}

// ---- options and shapes

template <typename Options>
void expect_refused(optim::SecondOrderOptimizer& optimizer, Tensors& params,
                    const std::function<void(Options&)>& change, const std::string& was) {
  train(optimizer, params, 0, 2);
  const auto good = options_of<Options>(optimizer, 1);
  change(options_of<Options>(optimizer, 1));
  const auto state = all_state(optimizer);
  const auto values = copies(params);
  const auto message = message_of<c10::ValueError>([&] { optimizer.step(); });
  expect_contains(message, "of group 1");
  expect_contains(message, was);
  expect_equal(all_state(optimizer), state);
  expect_equal(copies(params), values);
  options_of<Options>(optimizer, 1) = good;
  train(optimizer, params, 2, 3);
}

template <typename Optimizer, typename Options>
Optimizer two_groups(const Tensors& params, const Options& options) {
  const torch::optim::OptimizerParamGroup first({params.begin(), params.begin() + 4});
  const torch::optim::OptimizerParamGroup second({params.begin() + 4, params.end()});
  return Optimizer({first, second}, options);
}

TEST(ChangedOptions, ThatTheStateCannotFollowAreRefusedByName) {
  auto params = odd_parameters();
  auto shampoo = two_groups<Shampoo>(params, ShampooOptions(0.1).block_size(4));
  expect_refused<ShampooOptions>(
      shampoo, params, [](auto& o) { o.block_size(2); }, "block_size from 4 to 2");
  expect_refused<ShampooOptions>(
      shampoo, params, [](auto& o) { o.preconditioner_1d("full"); },
      "preconditioner_1d from 'diagonal' to 'full'");
  auto adagrad = two_groups<Adagrad>(params, AdagradOptions(0.1));
  expect_refused<AdagradOptions>(
      adagrad, params, [](auto& o) { o.full_matrix(true); }, "full_matrix from False to True");
}

TEST(ChangedShapes, AreRefusedByName) {
  auto param = parameter(torch::ones({4, 3}));
  Shampoo optimizer({param}, ShampooOptions(0.1).momentum(0.9));
  train(optimizer, {param}, 0, 2);
  param.mutable_grad().reset();
  param.set_data(torch::ones({5, 3}));
  set_grad(param, torch::ones({5, 3}));
  expect_contains(
      message_of<c10::ValueError>([&] { optimizer.step(); }),
      "the state of parameter 0 of group 0 (shape [5, 3]) does not fit after the change of its "
      "shape from [4, 3] to [5, 3]");
}

TEST(ChangedDampingSplits, MakeNewInverses) {
  auto model = make_mlp();
  KFAC optimizer(*model, KFACOptions(0.01).TCov(1).damping_split("pi"));
  const auto weight = model->parameters()[0];
  const auto state = [&]() -> KFACParamState& {
    return static_cast<KFACParamState&>(*optimizer.state().at(weight.unsafeGetTensorImpl()));
  };
  int step = 0;
  torch::Tensor before;
  for (const std::string split : {"pi", "exact", "plain", "pi"}) {
    options_of<KFACOptions>(optimizer).damping_split(split);
    train_on(optimizer, model, make_batch(step++, kMlpSample));
    if (before.defined() && state().A_inverse().defined()) {  // no inverse is due by its schedule
      EXPECT_FALSE(torch::equal(state().A_inverse(), before));
    }
    before = state().A_inverse().defined() ? state().A_inverse().clone() : torch::Tensor();
    train_on(optimizer, model, make_batch(step++, kMlpSample));
    EXPECT_EQ(state().A_inverse().defined(), split != "exact");
    EXPECT_EQ(state().A_eigenvectors().defined(), split == "exact");
    EXPECT_EQ(state().factor_updates().item<float>(), static_cast<float>(step));
    const auto& root = split == "exact" ? state().A_eigenvectors() : state().A_inverse();
    EXPECT_FALSE(torch::equal(root[0], torch::eye(root.size(-1), root.options())));
  }
}

// The next step computes the inverses for a new damping_split, even if it is skipped, and archives
// from any moment can be loaded.
TEST(ChangedDampingSplits, LeaveNoStepAndNoArchiveWithoutInverses) {
  for (const auto& [first, second] : std::vector<std::pair<std::string, std::string>>{
           {"exact", "pi"}, {"pi", "exact"}, {"exact", "plain"}, {"plain", "exact"}}) {
    SCOPED_TRACE(first + " to " + second);
    auto model = make_mlp();
    KFAC optimizer(*model, KFACOptions(0.01).TCov(2).TInv(100).damping_split(first));
    for (int step = 0; step < 2; ++step) {
      train_on(optimizer, model, make_batch(step, kMlpSample));
    }
    options_of<KFACOptions>(optimizer).damping_split(second);
    KFAC loaded(*model);
    load(loaded, saved(optimizer));  // before the step that computes the inverses
    expect_equal(all_state(loaded), all_state(optimizer));

    auto batch = make_batch(2, kMlpSample);
    batch.inputs[0][0] = kNaN;
    train_on(optimizer, model, batch);
    const auto& state = static_cast<KFACParamState&>(
        *optimizer.state().at(model->parameters()[0].unsafeGetTensorImpl()));
    const auto& root = second == "exact" ? state.A_eigenvectors() : state.A_inverse();
    ASSERT_TRUE(root.defined());
    EXPECT_FALSE(torch::equal(root[0], torch::eye(root.size(-1), root.options())));
    load(loaded, saved(optimizer));
    expect_equal(all_state(loaded), all_state(optimizer));
    train_on(loaded, model, make_batch(3, kMlpSample));
  }
}

TEST(ExpandedParameters, AreRefused) {
  const auto expanded = torch::ones({1, 3}).expand({4, 3}).requires_grad_();
  const auto message = message_of<c10::ValueError>([&] { Shampoo optimizer({expanded}); });
  expect_contains(message, "parameter 0 of group 0 (shape [4, 3]) is expanded");
}

// ---- averages that start late

// The length of a step with a gradient of ones.
double step_length(Shampoo& optimizer, torch::Tensor& param) {
  const auto before = param.detach().clone();
  set_grad(param, torch::ones_like(param));
  optimizer.step();
  return (param.detach() - before).norm().item<double>();
}

TEST(LateAverages, HaveStepsOfTheRightLength) {
  auto param = parameter(torch::ones({6, 4}));
  Shampoo optimizer({param}, ShampooOptions(1e-3).grafting("sgd"));
  for (int step = 0; step < 200; ++step) {
    step_length(optimizer, param);
  }
  options_of<ShampooOptions>(optimizer).grafting("adam").betas({0.9, 1.0});
  for (int step = 0; step < 3; ++step) {
    EXPECT_NEAR(step_length(optimizer, param), 1e-3 * std::sqrt(24.0), 1e-6);
  }
  const auto& state =
      static_cast<ShampooParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
  EXPECT_EQ(state.exp_avg_start().item<float>(), 200);
  EXPECT_EQ(state.grafting_second_moment_start().item<float>(), 200);

  auto resumed_param = parameter(param.detach());
  Shampoo resumed({resumed_param});
  load(resumed, saved(optimizer));
  expect_equal(all_state(resumed), all_state(optimizer));
  EXPECT_NEAR(step_length(resumed, resumed_param), 1e-3 * std::sqrt(24.0), 1e-6);
}

TEST(LateAverages, StartAfreshAfterAPause) {
  auto param = parameter(torch::ones({6, 4}));
  Shampoo optimizer({param}, ShampooOptions(1e-3).grafting("adam").betas({0.9, 0.99}));
  for (int step = 0; step < 50; ++step) {
    step_length(optimizer, param);
  }
  options_of<ShampooOptions>(optimizer).grafting("sgd").betas({0.0, 0.99});
  step_length(optimizer, param);
  options_of<ShampooOptions>(optimizer).grafting("adam").betas({0.9, 0.99});
  EXPECT_NEAR(step_length(optimizer, param), 1e-3 * std::sqrt(24.0), 1e-6);
  const auto& state =
      static_cast<ShampooParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
  EXPECT_EQ(state.grafting_second_moment_start().item<float>(), 51);
}

TEST(LateAverages, OfAnotherKindStartAfreshAfterALoadToo) {
  auto param = parameter(torch::ones({6, 4}));
  Shampoo optimizer({param}, ShampooOptions(1e-3).grafting("adam").betas({0.0, 0.99}));
  for (int step = 0; step < 50; ++step) {
    step_length(optimizer, param);
  }
  load(optimizer, saved(optimizer));
  options_of<ShampooOptions>(optimizer).grafting("adagrad");
  EXPECT_NEAR(step_length(optimizer, param), 1e-3 * std::sqrt(24.0), 1e-6);
  const auto& state =
      static_cast<ShampooParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
  EXPECT_EQ(state.grafting_second_moment_start().item<float>(), 50);
}

// An archive does not tell of what kind it is.
TEST(LateAverages, OfAnotherKindStartAfreshInAnArchiveToo) {
  auto param = parameter(torch::ones({6, 4}));
  Shampoo optimizer({param}, ShampooOptions(1e-3).grafting("adam").betas({0.0, 0.99}));
  train(optimizer, {param}, 0, 5);
  options_of<ShampooOptions>(optimizer).grafting("adagrad");
  auto resumed_param = parameter(param.detach().clone());
  Shampoo resumed({resumed_param});
  load(resumed, saved(optimizer));
  train(optimizer, {param}, 5, 8);
  train(resumed, {resumed_param}, 5, 8);
  expect_equal(copies({resumed_param}), copies({param}));
  expect_equal(all_state(resumed), all_state(optimizer));
}

// ---- counts

template <typename Options>
void expect_to_count_beyond_float32(optim::SecondOrderOptimizer& optimizer,
                                    const std::function<void(int)>& take_step,
                                    const torch::Tensor& param, const std::string& root,
                                    const std::vector<int>& due) {
  const auto tensor = [&](const std::string& key) {
    for (const auto& [name, value] : state_tensors(optimizer, param)) {
      if (name == key) {
        return value;
      }
    }
    return torch::Tensor();
  };
  take_step(0);
  tensor("step").fill_(std::pow(2.0, 24));
  load(optimizer, saved(optimizer));
  std::vector<int> renewed;
  for (int t = 1; t < 8; ++t) {
    const auto before = tensor(root).clone();
    take_step(t);
    if (!torch::equal(tensor(root), before)) {
      renewed.push_back(t);
    }
  }
  EXPECT_EQ(renewed, due);
  EXPECT_EQ(step_of(optimizer, param), std::pow(2.0, 24) + 7);
}

TEST(StepCounts, GoOnBeyondThoseOfAFloat32) {
  auto param = parameter(torch::eye(4));
  Shampoo shampoo({param}, ShampooOptions(0.1).update_freq(3));
  expect_to_count_beyond_float32<ShampooOptions>(
      shampoo, [&](int t) { train(shampoo, {param}, t, t + 1); }, param, "roots.0", {2, 5});
  auto model = make_mlp();
  const auto weight = model->parameters()[0];
  KFAC kfac(*model, KFACOptions(0.01).TCov(1).TInv(3));
  expect_to_count_beyond_float32<KFACOptions>(
      kfac, [&](int t) { train_on(kfac, model, make_batch(t, kMlpSample)); }, weight, "A_inverse",
      {3, 6});
}

// ---- calls that raise

// During its lifetime, allocation number `count` from now on raises, if there is one.
class FailingAllocations : public c10::Allocator {
 public:
  explicit FailingAllocations(int count) : left_(count), before_(c10::GetCPUAllocator()) {
    c10::SetCPUAllocator(this, kPriority);
  }
  ~FailingAllocations() override { c10::SetCPUAllocator(before_, kPriority); }
  FailingAllocations(const FailingAllocations&) = delete;
  FailingAllocations& operator=(const FailingAllocations&) = delete;

  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(left_-- != 0, "no memory");
    return before_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return before_->raw_deleter(); }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    before_->copy_data(target, source, bytes);
  }

 private:
  static constexpr uint8_t kPriority = 100;
  std::atomic<int> left_;
  c10::Allocator* before_;
};

// The next step repeats a factorisation that ran out of memory.
TEST(OutOfMemory, LeavesNoHalfMadeFactorization) {
  bool fails = true;
  for (int allocation = 0; fails; ++allocation) {
    SCOPED_TRACE(allocation);
    auto model = make_mlp();
    NaturalGradient optimizer(
        *model, NaturalGradientOptions(0.1).damping(0.1).update_freq(100).solver("gram"));
    train_on(optimizer, model, make_batch(0, kMlpSample));
    options_of<NaturalGradientOptions>(optimizer).damping(0.2);
    for (auto& param : model->parameters()) {
      set_grad(param, torch::ones_like(param));
    }
    try {
      const FailingAllocations failing(allocation);
      optimizer.step();
      fails = false;
    } catch (const c10::Error&) {
    }
    optimizer.step();
    EXPECT_EQ(optimizer.report().solver, "gram");
  }
}

// ---- archives

TEST(StatesOfTheGraftedRule, MustHaveItsSecondMoment) {
  const auto params = odd_parameters();
  const auto options = ShampooOptions(0.1).preconditioned(false).grafting("adam");
  Shampoo source(params, options);
  train(source, params, 0, 2);
  static_cast<ShampooParamState&>(*source.state().at(params[0].unsafeGetTensorImpl()))
      .grafting_second_moment({});
  Shampoo target(params, options);
  expect_contains(
      refusal_to_load(target, saved(source)),
      "grafting_second_moment is missing from the state of parameter 0 of group 0 (shape "
      "[7, 5]), which takes the direction of grafting='adam'");
}

TEST(ArchivesOfBadNumbers, AreRefusedByKey) {
  const auto options =
      ShampooOptions(0.1).betas({0.9, 0.99}).momentum(0.9).grafting("adam").block_size(4);
  auto params = odd_parameters();
  for (const std::string key : {"step", "statistics.0", "roots.1", "exp_avg",
                                "grafting_second_moment", "momentum_buffer"}) {
    for (const double value : {kNaN, kInfinity, -1.0}) {
      if (value == -1.0 && key != "step" && key != "grafting_second_moment") {
        continue;
      }
      Shampoo source(params, options);
      train(source, params, 0, 2);
      for (auto& [name, tensor] : state_tensors(source, params[0])) {
        if (name == key) {
          tensor.view(-1)[-1] = value;
        }
      }
      Shampoo target(params, options);
      const auto message = refusal_to_load(target, saved(source));
      expect_contains(message, "'" + key + "' of parameter 0 of group 0");
      expect_contains(message, value == -1.0 ? "below 0" : "not finite");
      EXPECT_TRUE(target.state().empty());
    }
  }
}

TEST(ArchivesOfBadNumbers, OfLayersAreRefusedByKey) {
  auto model = make_mlp(torch::kFloat);
  KFAC source(*model, KFACOptions(0.01));
  train_on(source, model, make_batch(0, kMlpSample, 6, torch::kFloat));
  auto tensors = state_tensors(source, model->parameters()[0]);
  for (auto& [key, tensor] : tensors) {
    if (key == "A_inverse") {
      tensor.view(-1)[0] = kNaN;
    }
  }
  KFAC target(*model);
  expect_contains(refusal_to_load(target, saved(source)), "'A_inverse' of '0.weight'");
}

}  // namespace
}  // namespace torchium::testing
