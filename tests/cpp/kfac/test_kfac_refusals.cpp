// Errors of K-FAC's steps and options.
#include "kfac_testing.h"

namespace torchium::testing {
namespace {

using torch::optim::OptimizerParamGroup;

TEST(Kfac, SkipsStepsThatAreNotFinite) {
  auto model = make_mlp();
  KFAC optimizer(*model, KFACOptions(0.05).TCov(1).TInv(1));
  const auto poisoned = [&] {
    auto batch = make_batch(7, kMlpSample);
    batch.inputs[0][0] = kNaN;
    train_on(optimizer, model, batch);
  };
  poisoned();
  train(optimizer, model, kMlpSample, 0, 3);
  auto clean_model = make_mlp();
  KFAC clean(*clean_model, KFACOptions(0.05).TCov(1).TInv(1));
  train(clean, clean_model, kMlpSample, 0, 3);
  expect_equal(copies(model->parameters()), copies(clean_model->parameters()));
  expect_equal(all_state(optimizer), all_state(clean));
  poisoned();
  poisoned();
  expect_contains(message_of<c10::Error>(poisoned), "3 steps in a row");
  expect_equal(copies(model->parameters()), copies(clean_model->parameters()));
}

TEST(Kfac, RefusesWrongOptions) {
  const nn::Linear model(2, 2);
  const auto refuses = [&](const KFACOptions& options, const std::string& part) {
    expect_contains(message_of<c10::ValueError>([&] { KFAC optimizer(*model, options); }), part);
  };
  refuses(KFACOptions(-1.0), "lr must be a finite number in [0, 3.40282e+38], got -1");
  refuses(KFACOptions(1e39), "lr must be a finite number in [0, 3.40282e+38], got 1e+39");
  refuses(KFACOptions().momentum(1.0), "momentum must be a finite number in [0, 1), got 1.0");
  refuses(KFACOptions().weight_decay(-0.1), "weight_decay");
  refuses(KFACOptions().damping(-1e-3), "damping");
  refuses(KFACOptions().damping(kNaN), "damping");
  refuses(KFACOptions().TCov(0), "TCov must be an integer of at least 1, got 0");
  refuses(KFACOptions().TInv(-1), "TInv must be an integer of at least 1, got -1");
  refuses(KFACOptions().eps(kInfinity), "eps");
  refuses(KFACOptions().stat_decay(1.5), "stat_decay must be a finite number in [0, 1], got 1.5");
  refuses(KFACOptions().kl_clip(0.0),
          "kl_clip must be None or a finite number in (0, inf), got 0.0");
  refuses(KFACOptions().damping_split("half"),
          "damping_split must be one of 'pi', 'plain', 'exact'");
}

TEST(Kfac, RefusesGroupsThatDoNotFitTogether) {
  auto model = make_mlp();
  const auto params = model->parameters();
  const auto group = [](torch::Tensor param, const KFACOptions& options) {
    return OptimizerParamGroup({std::move(param)}, std::make_unique<KFACOptions>(options));
  };
  KFAC optimizer(*model, {group(params[0], KFACOptions())});
  for (const auto& [options, name] : std::vector<std::pair<KFACOptions, std::string>>{
           {KFACOptions().kl_clip(std::nullopt), "kl_clip"},
           {KFACOptions().batch_averaged(false), "batch_averaged"},
           {KFACOptions().damping_split("exact"), "damping_split"}}) {
    const auto add = [&, &options = options] {
      optimizer.add_param_group(group(params[2], options));
    };
    expect_contains(message_of<c10::ValueError>(add),
                    name + " must be the same in all parameter groups");
    EXPECT_EQ(optimizer.param_groups().size(), 1U);
  }
  optimizer.add_param_group(group(params[2], KFACOptions(0.5).damping(1.0).TCov(3)));
  static_cast<KFACOptions&>(optimizer.param_groups()[1].options()).kl_clip(1.0);
  cross_entropy(model->forward(make_batch(0, kMlpSample).inputs), torch::zeros({6}, torch::kLong))
      .backward();
  const auto before = copies(params);
  expect_contains(message_of<c10::ValueError>([&] { optimizer.step(); }), "kl_clip");
  expect_equal(copies(params), before);
}

}  // namespace
}  // namespace torchium::testing
