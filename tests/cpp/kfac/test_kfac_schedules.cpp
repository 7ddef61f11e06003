// Options of K-FAC as functions of the step. test_parity_capturing.py compares more of them with
// Python.
#include "kfac_testing.h"
#include "torchium/optim/kfac_preconditioner.h"

#include <optional>
#include <stdexcept>

namespace torchium::testing {
namespace {

using optim::KFACPreconditioner;
using optim::KFACPreconditionerOptions;
using optim::Schedules;
using torch::optim::OptimizerParamGroup;

KFACOptions& options_in(KFAC& optimizer, size_t group = 0) {
  return static_cast<KFACOptions&>(optimizer.param_groups()[group].options());
}

Schedules all_schedules() {
  return {{"damping", [](int64_t step) { return 0.5 / static_cast<double>(step); }},
          {"stat_decay", [](int64_t step) { return step < 3 ? 0.5 : 0.9; }},
          {"TCov", [](int64_t step) { return step < 4 ? 1 : 2; }},
          {"TInv", [](int64_t step) { return 2 + step / 3; }},
          {"kl_clip", [](int64_t step) {
             return step < 3 ? c10::IValue() : c10::IValue(1e-3 * static_cast<double>(step));
           }}};
}

void set_by_hand(KFACOptions& options, int64_t step) {
  options.damping(0.5 / static_cast<double>(step))
      .stat_decay(step < 3 ? 0.5 : 0.9)
      .TCov(step < 4 ? 1 : 2)
      .TInv(2 + step / 3);
  options.kl_clip(step < 3 ? std::nullopt : std::optional(1e-3 * static_cast<double>(step)));
}

TEST(KfacSchedules, AreNumbersThatChange) {
  auto model = make_mlp(), other = make_mlp();
  KFAC optimizer(*model, KFACOptions(0.05).schedules(all_schedules()));
  KFAC by_hand(*other, KFACOptions(0.05));
  for (int step = 0; step < 9; ++step) {
    train(optimizer, model, kMlpSample, step, step + 1);
    set_by_hand(options_in(by_hand), step + 1);
    train(by_hand, other, kMlpSample, step, step + 1);
  }
  expect_equal(copies(model->parameters()), copies(other->parameters()));
  EXPECT_EQ(options_in(optimizer).TInv(), 5);  // of step 10, which is next
}

TEST(KfacSchedules, BelongToGroups) {
  auto model = make_mlp();
  const auto params = model->parameters();
  const auto group = [&](size_t first, std::optional<double> damping) {
    const std::vector<torch::Tensor> pair{params[first], params[first + 1]};
    if (!damping) {
      return OptimizerParamGroup(pair);
    }
    return OptimizerParamGroup(pair,
                               std::make_unique<KFACOptions>(KFACOptions().damping(*damping)));
  };
  KFAC optimizer(*model, {group(0, std::nullopt), group(2, 0.3)},
                 KFACOptions().schedules({{"damping", [](int64_t step) { return 1.0 / step; }}}));
  train(optimizer, model, kMlpSample, 0, 3);
  optimizer.add_param_group(group(4, std::nullopt));
  train(optimizer, model, kMlpSample, 3, 5);
  EXPECT_DOUBLE_EQ(options_in(optimizer, 0).damping(), 1.0 / 6.0);
  EXPECT_DOUBLE_EQ(options_in(optimizer, 1).damping(), 0.3);
  EXPECT_DOUBLE_EQ(options_in(optimizer, 2).damping(), 1.0 / 3.0);
}

TEST(KfacSchedules, OfAllGroupsFollowTheOneThatHasTakenMostSteps) {
  auto model = make_mlp();
  const auto params = model->parameters();
  const auto group = [&](size_t first) {
    return OptimizerParamGroup({params[first], params[first + 1]});
  };
  KFAC optimizer(*model, {group(0)},
                 KFACOptions().schedules({{"kl_clip", [](int64_t step) { return 0.1 / step; }}}));
  train(optimizer, model, kMlpSample, 0, 3);
  optimizer.add_param_group(group(2));
  train(optimizer, model, kMlpSample, 3, 5);
  EXPECT_DOUBLE_EQ(*options_in(optimizer, 0).kl_clip(), 0.1 / 6.0);
  EXPECT_DOUBLE_EQ(*options_in(optimizer, 1).kl_clip(), 0.1 / 6.0);
}

TEST(KfacSchedules, WithWrongValuesChangeNothing) {
  const auto refused = [](Schedules schedules) {
    auto model = make_mlp();
    return message_of<c10::ValueError>(
        [&] { KFAC(*model, KFACOptions().schedules(std::move(schedules))); });
  };
  expect_contains(refused({{"damping", [](int64_t) { return -1.0; }}}),
                  "damping must be a finite number in [0, inf), got -1.0, which its function "
                  "returned for step 1; change the function");
  expect_contains(refused({{"TCov", [](int64_t) { return 0; }}}),
                  "TCov must be an integer of at least 1, got 0, which");
  expect_contains(refused({{"TInv", [](int64_t) { return 1.5; }}}), "TInv must be an integer");
  expect_contains(refused({{"kl_clip", [](int64_t) { return 0.0; }}}), "kl_clip must be None or");
  expect_contains(refused({{"momentum", [](int64_t) { return 0.5; }}}),
                  "schedules has 'momentum'; the options that may be functions are damping, TCov");
  expect_contains(refused({{"damping", nullptr}}), "schedules has no function for 'damping'");

  auto model = make_mlp();
  KFAC optimizer(*model, KFACOptions().schedules(
                             {{"damping", [](int64_t step) { return step == 3 ? -1.0 : 0.5; }}}));
  train(optimizer, model, kMlpSample, 0, 2);
  const auto before = copies(model->parameters());
  const auto state = all_state(optimizer);
  const auto batch = make_batch(2, kMlpSample);
  optimizer.zero_grad();
  cross_entropy(model->forward(batch.inputs), batch.targets).backward();
  expect_contains(message_of<c10::ValueError>([&] { optimizer.step(); }), "returned for step 3");
  expect_equal(copies(model->parameters()), before);
  expect_equal(all_state(optimizer), state);
  options_in(optimizer).schedules().clear();
  train(optimizer, model, kMlpSample, 2, 3);
  EXPECT_FALSE(torch::equal(model->parameters()[0], before[0]));
}

TEST(KfacSchedules, RefuseAGroupWithAWrongValue) {
  auto model = make_mlp();
  const auto params = model->parameters();
  KFAC optimizer(*model, {OptimizerParamGroup({params[0], params[1]})});
  const auto wrong = KFACOptions().schedules({{"TCov", [](int64_t) { return 0; }}});
  const OptimizerParamGroup group({params[2]}, std::make_unique<KFACOptions>(wrong));
  expect_contains(message_of<c10::ValueError>([&] { optimizer.add_param_group(group); }),
                  "TCov must be");
  EXPECT_EQ(optimizer.param_groups().size(), 1);
}

TEST(KfacSchedules, ThrowInTheStepWhatTheFunctionThrows) {
  auto model = make_mlp();
  KFAC optimizer(*model, KFACOptions().schedules({{"TCov", [](int64_t step) -> int64_t {
                                                     if (step == 2) {
                                                       throw std::runtime_error("no value");
                                                     }
                                                     return 1;
                                                   }}}));
  train(optimizer, model, kMlpSample, 0, 1);
  EXPECT_THROW(train(optimizer, model, kMlpSample, 1, 2), std::runtime_error);
}

// Archives have values; an optimizer that loads one keeps its functions, also those of a group.
TEST(KfacSchedules, StayWithTheOptimizerThatLoadsAnArchive) {
  for (int pause = 1; pause < 6; ++pause) {
    auto model = make_mlp(), resumed_model = make_mlp();
    const auto make = [&](nn::Sequential& of) {
      const auto options = KFACOptions(0.05).schedules(all_schedules());
      return KFAC(*of,
                  {OptimizerParamGroup(of->parameters(), std::make_unique<KFACOptions>(options))});
    };
    auto optimizer = make(model), resumed = make(resumed_model);
    train(optimizer, model, kMlpSample, 0, pause);
    copy_parameters(*model, *resumed_model);
    load(resumed, saved(optimizer));
    train(optimizer, model, kMlpSample, pause, 9);
    train(resumed, resumed_model, kMlpSample, pause, 9);
    expect_equal(copies(resumed_model->parameters()), copies(model->parameters()));
    KFAC without(*resumed_model);
    load(without, saved(optimizer));
    EXPECT_TRUE(options_in(without).schedules().empty());
    EXPECT_EQ(options_in(without).damping(), options_in(optimizer).damping());
  }
}

TEST(KfacSchedules, LetThePreconditionerFollowALearningRate) {
  auto model = make_mlp();
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
  auto& of_sgd = sgd.param_groups()[0].options();
  KFACPreconditioner preconditioner(
      *model, KFACPreconditionerOptions().schedules(
                  {{"lr", [&](int64_t) { return of_sgd.get_lr(); }},
                   {"factor_update_steps", [](int64_t step) { return 1 + step % 2; }}}));
  for (int step = 0; step < 3; ++step) {
    const auto batch = make_batch(step, kMlpSample);
    sgd.zero_grad();
    cross_entropy(model->forward(batch.inputs), batch.targets).backward();
    of_sgd.set_lr(0.1 / (1 + step));
    preconditioner.step();
    EXPECT_EQ(preconditioner.param_groups()[0].options().get_lr(), of_sgd.get_lr());
    sgd.step();
  }
}

}  // namespace
}  // namespace torchium::testing
