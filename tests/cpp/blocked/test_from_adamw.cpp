// torchium::optim::Shampoo::from_adamw: the options that it keeps, and steps as long as AdamW's.
#include "optimizer_testing.h"
#include "torchium/optim/shampoo.h"

#include <memory>
#include <tuple>

namespace torchium::testing {
namespace {

using optim::Shampoo;
using optim::ShampooOptions;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

TEST(FromAdamW, OptionsAreThoseOfAdamW) {
  const auto options = ShampooOptions::from_adamw(
      AdamWOptions(2e-3).betas(std::make_tuple(0.8, 0.95)).eps(1e-6).weight_decay(0.3));
  EXPECT_EQ(options.lr(), 2e-3);
  EXPECT_EQ(options.betas(), std::make_tuple(0.8, 0.95));
  EXPECT_EQ(options.eps(), 1e-6 * 1e-6);
  EXPECT_EQ(options.grafting_eps(), 1e-6);
  EXPECT_EQ(options.weight_decay(), 0.3);
  EXPECT_TRUE(options.decoupled_weight_decay());
  EXPECT_EQ(options.grafting(), "adam");
  EXPECT_FALSE(ShampooOptions::from_adamw(AdamOptions(1e-3)).decoupled_weight_decay());
}

TEST(FromAdamW, TakesOverGroupsAndDefaults) {
  const Tensors params{parameter(torch::ones({3, 2})), parameter(torch::ones({2})),
                       parameter(torch::ones({4}))};
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Tensors{params[0]});
  groups.emplace_back(Tensors{params[1]}, std::make_unique<AdamWOptions>(
                                              AdamWOptions(0.5).weight_decay(0.0).eps(1e-4)));
  const AdamW adamw(groups, AdamWOptions(0.1).weight_decay(0.2));
  auto optimizer =
      Shampoo::from_adamw(adamw, [](ShampooOptions& options) { options.update_freq(7); });
  ASSERT_EQ(optimizer.param_groups().size(), 2);
  EXPECT_TRUE(optimizer.param_groups()[1].params()[0].is_same(params[1]));
  EXPECT_EQ(options_of<ShampooOptions>(optimizer, 0),
            ShampooOptions::from_adamw(AdamWOptions(0.1).weight_decay(0.2)).update_freq(7));
  EXPECT_EQ(
      options_of<ShampooOptions>(optimizer, 1),
      ShampooOptions::from_adamw(AdamWOptions(0.5).weight_decay(0.0).eps(1e-4)).update_freq(7));
  optimizer.add_param_group(OptimizerParamGroup(Tensors{params[2]}));
  EXPECT_EQ(options_of<ShampooOptions>(optimizer, 2), options_of<ShampooOptions>(optimizer, 0));
}

TEST(FromAdamW, GroupsOfParametersMayHaveOptionsOfAdamOrNone) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Tensors{parameter(torch::ones({2}))});
  groups.emplace_back(Tensors{parameter(torch::ones({2}))},
                      std::make_unique<AdamOptions>(AdamOptions(0.5).weight_decay(0.3)));
  const auto optimizer = Shampoo::from_adamw(groups, AdamWOptions(0.1));
  EXPECT_EQ(options_of<ShampooOptions>(optimizer, 0),
            ShampooOptions::from_adamw(AdamWOptions(0.1)));
  EXPECT_EQ(options_of<ShampooOptions>(optimizer, 1),
            ShampooOptions::from_adamw(AdamOptions(0.5).weight_decay(0.3)));
}

// Vectors and scalars step as with AdamW.
TEST(FromAdamW, VectorsStepAsWithAdamW) {
  torch::manual_seed(0);
  const Tensors params{parameter(torch::randn({7})), parameter(torch::randn({}))};
  const Tensors others = parameters_like(params);
  auto shampoo = Shampoo::from_adamw(params, AdamWOptions(0.01).weight_decay(0.1));
  AdamW adamw(others, AdamWOptions(0.01).weight_decay(0.1));
  for (int t = 0; t < 20; ++t) {
    for (size_t i = 0; i < params.size(); ++i) {
      torch::Tensor param = params[i];
      torch::Tensor other = others[i];
      const torch::Tensor grad = torch::randn_like(param.detach());
      set_grad(param, grad);
      set_grad(other, grad);
    }
    shampoo.step();
    adamw.step();
  }
  for (size_t i = 0; i < params.size(); ++i) {
    expect_near(params[i].detach(), others[i].detach());
  }
}

// Adam's L2 penalty; the first step of a matrix is as long as Adam's.
TEST(FromAdamW, FirstStepOfAMatrixHasTheLengthOfAdams) {
  torch::manual_seed(0);
  const Tensors params{parameter(torch::randn({6, 4}))};
  const Tensors others = parameters_like(params);
  const torch::Tensor start = params[0].detach().clone();
  auto shampoo = Shampoo::from_adamw(Adam(params, AdamOptions(0.01).weight_decay(0.1)));
  Adam adam(others, AdamOptions(0.01).weight_decay(0.1));
  train(shampoo, params, 0, 1);
  train(adam, others, 0, 1);
  const torch::Tensor ours = params[0].detach() - start;
  const torch::Tensor theirs = others[0].detach() - start;
  expect_near(ours.norm(), theirs.norm());
  EXPECT_FALSE(torch::allclose(ours, theirs, 0.01));
}

TEST(FromAdamW, RefusesWhatShampooCannotDo) {
  const Tensors params{parameter(torch::ones({2}))};
  EXPECT_THROW(Shampoo::from_adamw(AdamW(params, AdamWOptions().amsgrad(true))), c10::ValueError);
  EXPECT_THROW(Shampoo::from_adamw(params, AdamWOptions().eps(-1.0)), c10::ValueError);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(params, std::make_unique<torch::optim::SGDOptions>(0.1));
  EXPECT_THROW(Shampoo::from_adamw(groups), c10::ValueError);
}

}  // namespace
}  // namespace torchium::testing
