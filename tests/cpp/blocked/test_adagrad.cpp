// torchium::optim::Adagrad: equal to libtorch's where both are defined, otherwise to values
// computed by hand.
#include "optimizer_testing.h"
#include "torchium/optim/adagrad.h"

#include <cmath>
#include <functional>

namespace torchium::testing {
namespace {

using optim::Adagrad;
using optim::AdagradOptions;
using optim::AdagradParamState;

TEST(Adagrad, DefaultsAreThoseOfPython) {
  const AdagradOptions options;
  EXPECT_EQ(options.lr(), 0.01);
  EXPECT_EQ(options.lr_decay(), 0.0);
  EXPECT_EQ(options.weight_decay(), 0.0);
  EXPECT_EQ(options.initial_accumulator_value(), 0.0);
  EXPECT_EQ(options.eps(), 1e-10);
  EXPECT_FALSE(options.full_matrix());
  EXPECT_EQ(options.block_size(), 128);
  EXPECT_EQ(options.update_freq(), 1);
  EXPECT_FALSE(options.maximize());
}

TEST(Adagrad, DiagonalFormEqualsLibtorchBitForBit) {
  const auto start = odd_parameters();
  auto ours = parameters_like(start);
  auto theirs = parameters_like(start);
  Adagrad optimizer(
      ours, AdagradOptions(0.1).lr_decay(0.01).weight_decay(0.1).initial_accumulator_value(0.5).eps(
                1e-8));
  torch::optim::Adagrad reference(theirs, torch::optim::AdagradOptions(0.1)
                                              .lr_decay(0.01)
                                              .weight_decay(0.1)
                                              .initial_accumulator_value(0.5)
                                              .eps(1e-8));
  train(optimizer, ours, 0, 20);
  train(reference, theirs, 0, 20);
  expect_equal(copies(ours), copies(theirs));
}

// G = g g^T; (G + eps I)^(-1/2) g = g / sqrt(|g|^2 + eps).
TEST(Adagrad, FullMatrixStepByHand) {
  auto param = parameter(torch::zeros({2, 1}));
  Adagrad optimizer({param}, AdagradOptions(1.0).full_matrix(true).eps(11.0));
  set_grad(param, torch::tensor({{3.0F}, {4.0F}}));
  optimizer.step();
  expect_near(param.detach(), torch::tensor({{-0.5F}, {-4.0F / 6.0F}}));
}

TEST(Adagrad, ClosureAndLearningRate) {
  auto param = parameter(torch::full({1}, 4.0F));
  Adagrad optimizer({param}, AdagradOptions(1.0).eps(0.0));
  const auto closure = [&] {
    optimizer.zero_grad();
    auto loss = param.square().sum();
    loss.backward();
    return loss;
  };
  EXPECT_EQ(optimizer.step(closure).item<float>(), 16.0F);
  EXPECT_NEAR(param.item<float>(), 3.0F, 1e-6);
  optimizer.param_groups()[0].options().set_lr(0.1);
  optimizer.step(closure);  // g = 6, sum = 64 + 36
  EXPECT_NEAR(param.item<float>(), 3.0F - 0.1F * 0.6F, 1e-6);
}

TEST(Adagrad, LowPrecisionParametersHaveFloatState) {
  for (const bool full_matrix : {false, true}) {
    const auto params = odd_parameters(torch::kBFloat16);
    Adagrad optimizer(params, AdagradOptions(0.1).full_matrix(full_matrix));
    train(optimizer, params, 0, 2);
    for (const auto& param : params) {
      for (const auto& [key, tensor] : state_tensors(optimizer, param)) {
        EXPECT_EQ(tensor.scalar_type(), float32_state_dtype(key)) << key;
      }
    }
  }
}

TEST(Adagrad, NonFiniteGradientsSkipAndThenRaise) {
  for (const bool full_matrix : {false, true}) {
    auto params = odd_parameters();
    Adagrad optimizer(params, AdagradOptions(0.1).full_matrix(full_matrix));
    train(optimizer, params, 0, 2);
    const auto values = copies(params);
    const auto state = all_state(optimizer);
    const auto bad_step = [&] {
      params[3].mutable_grad()[0][4] = kInfinity;
      optimizer.step();
    };
    bad_step();
    bad_step();
    expect_contains(message_of<c10::Error>(bad_step), "parameter 3 of group 0 (shape [1, 7])");
    expect_equal(copies(params), values);
    expect_equal(all_state(optimizer), state);
  }
}

TEST(Adagrad, BadOptionsAreRefused) {
  const auto param = parameter(torch::zeros({2, 2}));
  using Change = std::function<void(AdagradOptions&)>;
  const std::vector<std::pair<std::string, Change>> bad{
      {"lr must be", [](auto& o) { o.lr(-1.0); }},
      {"lr must be", [](auto& o) { o.lr(kNaN); }},
      {"lr must be a finite number in [0, 3.40282e+38], got 1e+39", [](auto& o) { o.lr(1e39); }},
      {"lr_decay must be", [](auto& o) { o.lr_decay(-1.0); }},
      {"weight_decay must be", [](auto& o) { o.weight_decay(kInfinity); }},
      {"initial_accumulator_value must be", [](auto& o) { o.initial_accumulator_value(-1.0); }},
      {"eps must be", [](auto& o) { o.eps(-1e-10); }},
      {"block_size must be", [](auto& o) { o.block_size(0); }},
      {"update_freq must be", [](auto& o) { o.update_freq(-3); }},
  };
  for (const auto& [part, change] : bad) {
    AdagradOptions options;
    change(options);
    expect_contains(message_of<c10::ValueError>([&] { Adagrad({param}, options); }), part);
  }
}

}  // namespace
}  // namespace torchium::testing
