// torchium::optim::Shampoo against values computed by hand, and its behaviour as a libtorch
// optimizer.
#include "optimizer_testing.h"
#include "torchium/optim/shampoo.h"

#include <ATen/autocast_mode.h>

#include <cmath>
#include <functional>

namespace torchium::testing {
namespace {

using optim::Shampoo;
using optim::ShampooOptions;
using optim::ShampooParamState;

// No damping, so values can be computed by hand.
ShampooOptions plain_options(double lr = 1.0) { return ShampooOptions(lr).eps(0.0).update_freq(1); }

ShampooParamState& state_of(Shampoo& optimizer, const torch::Tensor& param) {
  return static_cast<ShampooParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

TEST(Shampoo, DefaultsAreThoseOfPython) {
  const ShampooOptions options;
  EXPECT_EQ(options.lr(), 0.03);
  EXPECT_EQ(options.eps(), 1e-4);
  EXPECT_EQ(options.update_freq(), 100);
  EXPECT_EQ(options.weight_decay(), 0.0);
  EXPECT_EQ(options.betas(), std::make_tuple(0.0, 1.0));
  EXPECT_EQ(options.momentum(), 0.0);
  EXPECT_FALSE(options.nesterov());
  EXPECT_FALSE(options.decoupled_weight_decay());
  EXPECT_EQ(options.relative_eps(), 0.0);
  EXPECT_EQ(options.block_size(), 1024);
  EXPECT_TRUE(options.merge_dims());
  EXPECT_FALSE(options.target_order().has_value());
  EXPECT_FALSE(options.exponent().has_value());
  EXPECT_EQ(options.preconditioner_1d(), "diagonal");
  EXPECT_FALSE(options.grafting().has_value());
  EXPECT_EQ(options.grafting_eps(), 1e-8);
  EXPECT_FALSE(options.grafting_beta2().has_value());
  EXPECT_EQ(options.start_preconditioning_step(), 1);
  EXPECT_EQ(options.root_method(), "auto");
  EXPECT_FALSE(options.root_dtype().has_value());
  EXPECT_FALSE(options.matmul_precision().has_value());
  EXPECT_EQ(options.max_root_failures(), 3);
  EXPECT_FALSE(options.maximize());
  EXPECT_FALSE(options.capturable());
  EXPECT_EQ(options.graphs(), "auto");
}

// g = diag(2, 8): L = R = diag(4, 64), so that L^(-1/4) g R^(-1/4) = I; after a second step with
// the same gradient L = R = diag(8, 128) and the direction is I / sqrt(2).
TEST(Shampoo, MatrixStepByHand) {
  auto param = parameter(torch::zeros({2, 2}));
  Shampoo optimizer({param}, plain_options(0.5));
  set_grad(param, torch::diag(torch::tensor({2.0F, 8.0F})));
  optimizer.step();
  expect_near(param.detach(), -0.5 * torch::eye(2));
  expect_near(state_of(optimizer, param).statistics()[0][0],
              torch::diag(torch::tensor({4.0F, 64.0F})));
  optimizer.step();
  expect_near(param.detach(), -0.5 * (1.0 + std::sqrt(0.5)) * torch::eye(2));
  EXPECT_EQ(state_of(optimizer, param).step().item<float>(), 2.0F);
}

// a = g^2, so that the first direction is sign(g).
TEST(Shampoo, VectorHasTheDiagonalRule) {
  auto param = parameter(torch::zeros({3}));
  Shampoo optimizer({param}, plain_options());
  set_grad(param, torch::tensor({2.0F, -3.0F, 0.5F}));
  optimizer.step();
  expect_near(param.detach(), torch::tensor({-1.0F, 1.0F, -1.0F}));
  EXPECT_TRUE(state_of(optimizer, param).statistics().empty());
  expect_near(state_of(optimizer, param).diagonal(), torch::tensor({4.0F, 9.0F, 0.25F}));
}

TEST(Shampoo, AChangedRootDtypeConvertsTheRoots) {
  auto param = parameter(torch::zeros({2, 2}));
  Shampoo optimizer({param}, plain_options().update_freq(100));
  set_grad(param, torch::tensor({{2.0F, 1.0F}, {0.5F, 8.0F}}));
  for (int step = 1; step <= 8; ++step) {
    optimizer.step();
  }  // no roots at step 9
  const auto roots = state_of(optimizer, param).roots()[0].clone();
  static_cast<ShampooOptions&>(optimizer.param_groups()[0].options()).root_dtype("bfloat16");
  optimizer.step();
  expect_equal({state_of(optimizer, param).roots()[0]}, {roots.to(torch::kBFloat16)});
  EXPECT_EQ(state_of(optimizer, param).step().item<float>(), 9.0F);
}

// Directions 1, then 1 / sqrt(2) (see MatrixStepByHand), with momentum 0.5.
TEST(Shampoo, Momentum) {
  const double second = std::sqrt(0.5);
  for (const bool nesterov : {false, true}) {
    auto param = parameter(torch::zeros({1}));
    Shampoo optimizer({param}, plain_options().momentum(0.5).nesterov(nesterov));
    set_grad(param, torch::full({1}, 3.0F));
    optimizer.step();
    optimizer.step();
    const double buffer = 0.5 + second;
    const double expected = nesterov ? (1.0 + 0.5) + (second + 0.5 * buffer) : 1.0 + buffer;
    EXPECT_NEAR(param.item<float>(), -expected, 1e-5);
    EXPECT_NEAR(state_of(optimizer, param).momentum_buffer().item<float>(), buffer, 1e-5);
  }
}

// The averaged gradient of step 1 is 0.1 g, corrected to g.
TEST(Shampoo, BetasAreBiasCorrected) {
  auto param = parameter(torch::zeros({1}));
  Shampoo optimizer({param}, plain_options().betas({0.9, 0.99}));
  set_grad(param, torch::full({1}, 3.0F));
  optimizer.step();
  EXPECT_NEAR(param.item<float>(), -1.0F, 1e-5);
  EXPECT_NEAR(state_of(optimizer, param).exp_avg().item<float>(), 0.3F, 1e-6);
  EXPECT_NEAR(state_of(optimizer, param).diagonal().item<float>(), 0.09F, 1e-6);
}

TEST(Shampoo, MinimisesALinearRegression) {
  torch::manual_seed(0);
  const auto inputs = torch::randn({64, 6});
  const auto targets = inputs.mm(torch::randn({6, 3}));
  torch::nn::Linear model(6, 3);
  Shampoo optimizer(model->parameters(), ShampooOptions(0.3).update_freq(2));
  const auto loss = [&] { return torch::mse_loss(model(inputs), targets); };
  const double first = loss().item<double>();
  for (int i = 0; i < 200; ++i) {
    optimizer.zero_grad();
    loss().backward();
    optimizer.step();
  }
  EXPECT_LT(loss().item<double>(), 1e-3 * first);
}

TEST(Shampoo, ClosureRunsOnceWithGradients) {
  auto param = parameter(torch::full({1}, 2.0F));
  Shampoo optimizer({param}, plain_options());
  int calls = 0;
  const torch::NoGradGuard no_grad;
  const auto loss = optimizer.step([&] {
    ++calls;
    optimizer.zero_grad();
    auto value = param.square().sum();
    value.backward();
    return value;
  });
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(loss.item<float>(), 4.0F);
  EXPECT_NEAR(param.item<float>(), 1.0F, 1e-6);
  EXPECT_FALSE(optimizer.step().defined());
}

TEST(Shampoo, SchedulersSetTheLearningRate) {
  auto param = parameter(torch::zeros({1}));
  Shampoo optimizer({param}, plain_options(1.0));
  torch::optim::SGD reference({parameter(torch::zeros({1}))}, torch::optim::SGDOptions(1.0));
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/2, /*gamma=*/0.5);
  torch::optim::StepLR reference_scheduler(reference, /*step_size=*/2, /*gamma=*/0.5);
  double expected = 0.0;
  for (int t = 1; t <= 6; ++t) {
    const double lr = reference.param_groups()[0].options().get_lr();
    set_grad(param, torch::full({1}, 3.0F));
    optimizer.step();
    scheduler.step();
    reference_scheduler.step();
    expected -= lr / std::sqrt(t);
  }
  EXPECT_LT(reference.param_groups()[0].options().get_lr(), 0.5);
  EXPECT_NEAR(param.item<float>(), expected, 1e-5);
}

TEST(Shampoo, ParametersWithoutGradientAreLeftAlone) {
  auto used = parameter(torch::zeros({2, 2}));
  auto unused = parameter(torch::ones({2, 2}));
  auto frozen = torch::ones({3});
  Shampoo optimizer({unused, used, frozen}, plain_options());
  const auto grad = torch::diag(torch::tensor({2.0F, 8.0F}));
  set_grad(used, grad);
  optimizer.step();
  EXPECT_EQ(optimizer.state().size(), 1U);
  expect_equal({unused.detach(), frozen}, {torch::ones({2, 2}), torch::ones({3})});
  // A late parameter counts its own steps; the other one's state is moved in storage but keeps its
  // values.
  const auto statistics = state_of(optimizer, used).statistics()[0].clone();
  used.mutable_grad() = torch::Tensor();
  set_grad(unused, grad);
  optimizer.step();
  expect_near(unused.detach(), torch::ones({2, 2}) - torch::eye(2));
  expect_equal({state_of(optimizer, used).statistics()[0]}, {statistics});
  EXPECT_EQ(state_of(optimizer, used).step().item<float>(), 1.0F);
  EXPECT_EQ(state_of(optimizer, unused).step().item<float>(), 1.0F);
}

TEST(Shampoo, LateParametersDoNotChangeTheOthers) {
  const auto start = odd_parameters();
  auto alone = parameters_like(start);
  auto together = parameters_like(start);
  const auto options = ShampooOptions(0.1).update_freq(2).block_size(4);
  Shampoo first(alone, options);
  Shampoo second(together, options);
  const Tensors most(together.begin() + 1, together.end());
  train(first, Tensors(alone.begin() + 1, alone.end()), 0, 5);
  train(second, most, 0, 2);
  set_grad(together[0], torch::ones_like(together[0]));
  train(second, most, 2, 5);
  expect_equal(copies(most), copies(Tensors(alone.begin() + 1, alone.end())));
}

TEST(Shampoo, LowPrecisionParametersHaveFloatState) {
  const auto params = odd_parameters(torch::kBFloat16);
  Shampoo optimizer(params, ShampooOptions(0.1).betas({0.9, 0.99}).momentum(0.9).grafting("adam"));
  train(optimizer, params, 0, 3);
  for (const auto& param : params) {
    EXPECT_EQ(param.scalar_type(), torch::kBFloat16);
    for (const auto& [key, tensor] : state_tensors(optimizer, param)) {
      EXPECT_EQ(tensor.scalar_type(), float32_state_dtype(key)) << key;
    }
  }
}

TEST(Shampoo, NonFiniteGradientSkipsTheGroup) {
  auto params = odd_parameters();
  Shampoo optimizer(params, ShampooOptions(0.1).update_freq(2).momentum(0.9));
  train(optimizer, params, 0, 3);
  const auto values = copies(params);
  const auto state = all_state(optimizer);
  const auto poison = [&](double value) {
    for (auto& param : params) {
      set_grad(param, torch::ones_like(param));
    }
    params[1].mutable_grad()[2] = value;
  };
  for (const double value : {kNaN, -kInfinity}) {
    poison(value);
    optimizer.step();
    expect_equal(copies(params), values);
    expect_equal(all_state(optimizer), state);
  }
  train(optimizer, params, 3, 4);
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), 4.0F);
  EXPECT_FALSE(torch::equal(params[0], values[0]));
}

TEST(Shampoo, ThirdSkippedStepInARowRaises) {
  auto params = odd_parameters();
  Shampoo optimizer(params, ShampooOptions(0.1));
  const auto bad_step = [&] {
    for (auto& param : params) {
      set_grad(param, torch::ones_like(param));
    }
    params[1].mutable_grad()[2] = kNaN;
    optimizer.step();
  };
  bad_step();
  bad_step();
  train(optimizer, params, 0, 1);
  bad_step();
  bad_step();
  const auto message = message_of<c10::Error>(bad_step);
  expect_contains(message, "3 steps in a row");
  expect_contains(message, "parameter 1 of group 0 (shape [5])");
  EXPECT_THROW(optimizer.check_errors(), c10::Error);
  train(optimizer, params, 1, 2);
  EXPECT_NO_THROW(optimizer.check_errors());
}

TEST(Shampoo, GroupsAreSkippedOnTheirOwn) {
  auto good = parameter(torch::zeros({1}));
  auto bad = parameter(torch::zeros({1}));
  Shampoo optimizer(
      {torch::optim::OptimizerParamGroup({good}), torch::optim::OptimizerParamGroup({bad})},
      plain_options());
  set_grad(good, torch::ones({1}));
  set_grad(bad, torch::full({1}, kNaN));
  optimizer.step();
  EXPECT_NEAR(good.item<float>(), -1.0F, 1e-6);
  EXPECT_EQ(bad.item<float>(), 0.0F);
}

// Statistics that are not finite have no root, and the parameter keeps its last one.
TEST(Shampoo, FailedRootsAreNeverUsedAndThenRaise) {
  auto good = parameter(torch::zeros({2, 2}));
  auto bad = parameter(torch::zeros({3, 2}));
  Shampoo optimizer({good, bad}, ShampooOptions(1.0).update_freq(1).max_root_failures(2));
  const auto step = [&](bool with_good) {
    good.mutable_grad() = with_good ? torch::eye(2) : torch::Tensor();
    bad.mutable_grad() = torch::ones({3, 2});
    optimizer.step();
  };
  step(/*with_good=*/true);
  torch::Tensor statistics = state_of(optimizer, bad).statistics()[0];
  const auto root = state_of(optimizer, bad).roots()[0].clone();
  statistics.fill_(kInfinity);
  step(/*with_good=*/true);
  expect_equal({state_of(optimizer, bad).roots()[0]}, {root});
  EXPECT_TRUE(bad.isfinite().all().item<bool>());
  EXPECT_EQ(state_of(optimizer, bad).root_failures()[0].item<int>(), 1);
  EXPECT_EQ(state_of(optimizer, good).root_failures()[0].item<int>(), 0);
  const auto message = message_of<c10::Error>([&] { step(/*with_good=*/false); });
  expect_contains(message, "parameter 1 of group 0 (shape [3, 2]) failed 2 times in a row");
}

TEST(Shampoo, AutocastDoesNotReachTheStep) {
  const auto start = odd_parameters();
  const auto plain_params = parameters_like(start);
  const auto autocast_params = parameters_like(start);
  Shampoo plain(plain_params, ShampooOptions(0.1));
  Shampoo autocast(autocast_params, ShampooOptions(0.1));
  train(plain, plain_params, 0, 3);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  train(autocast, autocast_params, 0, 3);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  expect_equal(copies(autocast_params), copies(plain_params));
}

TEST(Shampoo, BadOptionsAreRefused) {
  const auto param = parameter(torch::zeros({2, 2}));
  using Change = std::function<void(ShampooOptions&)>;
  const std::vector<std::pair<std::string, Change>> bad{
      {"lr must be", [](auto& o) { o.lr(-1.0); }},
      {"lr must be", [](auto& o) { o.lr(kNaN); }},
      {"lr must be", [](auto& o) { o.lr(kInfinity); }},
      {"lr must be a finite number in [0, 3.40282e+38], got 1e+39", [](auto& o) { o.lr(1e39); }},
      {"eps must be", [](auto& o) { o.eps(-1e-3); }},
      {"eps must be", [](auto& o) { o.eps(kNaN); }},
      {"update_freq must be", [](auto& o) { o.update_freq(0); }},
      {"weight_decay must be", [](auto& o) { o.weight_decay(-0.1); }},
      {"weight_decay must be", [](auto& o) { o.weight_decay(kInfinity); }},
      {"betas[0] must be",
       [](auto& o) {
         o.betas({1.0, 0.9});
       }},
      {"betas[0] must be",
       [](auto& o) {
         o.betas({kNaN, 0.9});
       }},
      {"betas[1] must be",
       [](auto& o) {
         o.betas({0.9, 1.1});
       }},
      {"betas[1] must be",
       [](auto& o) {
         o.betas({0.9, -0.1});
       }},
      {"momentum must be", [](auto& o) { o.momentum(1.0); }},
      {"momentum must be", [](auto& o) { o.momentum(-0.5); }},
      {"nesterov=True needs momentum", [](auto& o) { o.nesterov(true); }},
      {"relative_eps must be", [](auto& o) { o.relative_eps(-1.0); }},
      {"block_size must be", [](auto& o) { o.block_size(0); }},
      {"exponent must be", [](auto& o) { o.exponent(0.5); }},
      {"exponent must be", [](auto& o) { o.exponent(-kInfinity); }},
      {"preconditioner_1d must be", [](auto& o) { o.preconditioner_1d("none"); }},
      {"grafting must be", [](auto& o) { o.grafting("lamb"); }},
      {"grafting_eps must be", [](auto& o) { o.grafting_eps(-1.0); }},
      {"grafting_beta2 must be", [](auto& o) { o.grafting_beta2(1.0); }},
      {"start_preconditioning_step must be", [](auto& o) { o.start_preconditioning_step(0); }},
      {"root_method must be", [](auto& o) { o.root_method("svd"); }},
      {"root_dtype must be", [](auto& o) { o.root_dtype("float16"); }},
      {"graphs must be", [](auto& o) { o.graphs("on"); }},
      {"matmul_precision must be", [](auto& o) { o.matmul_precision("tf32"); }},
      {"max_root_failures must be", [](auto& o) { o.max_root_failures(0); }},
  };
  Shampoo existing({parameter(torch::zeros({2}))});
  for (const auto& [part, change] : bad) {
    ShampooOptions options;
    change(options);
    expect_contains(message_of<c10::ValueError>([&] { Shampoo({param}, options); }), part);
    const torch::optim::OptimizerParamGroup group({param},
                                                  std::make_unique<ShampooOptions>(options));
    expect_contains(message_of<c10::ValueError>([&] { existing.add_param_group(group); }), part);
    EXPECT_EQ(existing.param_groups().size(), 1U);
  }
  expect_contains(message_of<c10::ValueError>([&] { Shampoo({param}, ShampooOptions(-2.5)); }),
                  "-2.5");
}

TEST(Shampoo, OptionsChangedToBadOnesAreRefusedByTheStep) {
  auto first = parameter(torch::zeros({1}));
  auto second = parameter(torch::zeros({1}));
  Shampoo optimizer(
      {torch::optim::OptimizerParamGroup({first}), torch::optim::OptimizerParamGroup({second})},
      plain_options());
  set_grad(first, torch::ones({1}));
  set_grad(second, torch::ones({1}));
  static_cast<ShampooOptions&>(optimizer.param_groups()[1].options()).eps(-1.0);
  EXPECT_THROW(optimizer.step(), c10::ValueError);
  EXPECT_EQ(first.item<float>(), 0.0F);
}

TEST(Shampoo, ParametersThatDoNotFitAreRefused) {
  const auto good = parameter(torch::zeros({2, 2}));
  const auto refusal = [&](const torch::Tensor& bad) {
    return message_of<c10::ValueError>([&] { Shampoo({good, bad}); });
  };
  expect_contains(refusal(torch::eye(3).to_sparse().requires_grad_()),
                  "parameter 1 of group 0 (shape [3, 3]) has layout Sparse");
  expect_contains(refusal(torch::zeros({2}, torch::kComplexFloat).requires_grad_()),
                  "parameter 1 of group 0 (shape [2]) has dtype complex64");
  expect_contains(refusal(torch::zeros({2}, torch::kLong)), "dtype int64");
  expect_contains(refusal(good), "is in the optimizer already");
  expect_contains(refusal(good * 2), "not a leaf");
  expect_contains(refusal(torch::Tensor()), "undefined");
  EXPECT_THROW(Shampoo({torch::optim::OptimizerParamGroup(
                   {good}, std::make_unique<torch::optim::AdamOptions>())}),
               c10::ValueError);
}

TEST(Shampoo, SparseGradientsAreRefused) {
  auto dense = parameter(torch::zeros({2, 2}));
  auto embedding = parameter(torch::zeros({4, 2}));
  Shampoo optimizer({dense, embedding}, plain_options());
  set_grad(dense, torch::eye(2));
  embedding.mutable_grad() = torch::ones({4, 2}).to_sparse();
  expect_contains(message_of<c10::ValueError>([&] { optimizer.step(); }),
                  "the gradient of parameter 1 of group 0 (shape [4, 2]) has layout Sparse");
  EXPECT_TRUE(optimizer.state().empty());
  expect_equal({dense.detach()}, {torch::zeros({2, 2})});
}

TEST(Shampoo, GroupsHaveTheirOwnOptions) {
  auto first = parameter(torch::zeros({1}));
  auto second = parameter(torch::zeros({1}));
  Shampoo optimizer({first}, plain_options());
  set_grad(first, torch::full({1}, 3.0F));
  optimizer.step();
  optimizer.add_param_group({{second}, std::make_unique<ShampooOptions>(plain_options().lr(0.25))});
  set_grad(second, torch::full({1}, 3.0F));
  optimizer.step();
  EXPECT_NEAR(first.item<float>(), -1.0 - std::sqrt(0.5), 1e-5);
  EXPECT_NEAR(second.item<float>(), -0.25, 1e-6);
  EXPECT_THROW(optimizer.add_param_group(torch::optim::OptimizerParamGroup({first})),
               c10::ValueError);
}

TEST(Shampoo, CapturableLeavesTheRootsToTheCaller) {
  auto param = parameter(torch::zeros({2, 2}));
  Shampoo optimizer({param}, plain_options().capturable(true));
  const auto grad = torch::diag(torch::tensor({2.0F, 8.0F}));
  set_grad(param, grad);
  optimizer.step();
  expect_near(param.detach(), -grad);  // identity roots
  optimizer.update_preconditioners();
  // L = diag(8, 128) after the second step, but the roots of diag(4, 64) are used.
  optimizer.step();
  expect_near(param.detach(), -grad - torch::eye(2));
  // A new learning rate reaches the tensor that steps read.
  optimizer.param_groups()[0].options().set_lr(0.5);
  optimizer.sync_lr();
  optimizer.step();
  expect_near(param.detach(), -grad - 1.5 * torch::eye(2));
  optimizer.param_groups()[0].options().set_lr(1e39);
  expect_contains(message_of<c10::ValueError>([&] { optimizer.sync_lr(); }), "got 1e+39");
}

TEST(Shampoo, CanBeMoved) {
  const auto start = odd_parameters();
  auto plain_params = parameters_like(start);
  auto moved_params = parameters_like(start);
  Shampoo plain(plain_params, ShampooOptions(0.1));
  train(plain, plain_params, 0, 4);
  Shampoo source(moved_params, ShampooOptions(0.1));
  train(source, moved_params, 0, 2);
  Shampoo target(std::move(source));
  train(target, moved_params, 2, 4);
  expect_equal(copies(moved_params), copies(plain_params));
}

}  // namespace
}  // namespace torchium::testing
