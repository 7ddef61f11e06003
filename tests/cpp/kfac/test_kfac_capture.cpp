// K-FAC's captures of forward and backward passes, and their lifetime.
#include "kfac_testing.h"

#include <thread>

namespace torchium::testing {
namespace {

// Trains a model in a way that must give the same result as one batch per step.
template <typename Action>
void expect_as_usual(nn::Sequential (*make)(torch::Dtype), torch::IntArrayRef sample,
                     Action&& train_step) {
  const auto options = KFACOptions(0.05).TCov(2).TInv(2).kl_clip(1e-2);
  auto model = make(torch::kDouble);
  auto usual_model = make(torch::kDouble);
  KFAC optimizer(*model, options);
  KFAC usual(*usual_model, options);
  for (int step = 0; step < 5; ++step) {
    const auto batch = make_batch(step, sample);
    train_on(usual, usual_model, batch);
    train_step(optimizer, model, batch);
  }
  expect_near_each(model->parameters(), usual_model->parameters(), 1e-9);
  const auto state = all_state(usual);
  expect_near_each(all_state(optimizer), state, 1e-6);
}

void accumulate(KFAC& optimizer, nn::Sequential& model, const Batch& batch) {
  optimizer.zero_grad();
  for (int part = 0; part < 3; ++part) {
    const auto output = model->forward(batch.inputs.narrow(0, 2 * part, 2));
    (cross_entropy(output, batch.targets.narrow(0, 2 * part, 2)) / 3).backward();
  }
  optimizer.step();
}

TEST(Kfac, TakesMicroBatchesAsOneBatch) {
  expect_as_usual(&make_mlp, kMlpSample, &accumulate);
  expect_as_usual(&make_convnet, kImageSample, &accumulate);
}

TEST(Kfac, IgnoresPassesWithoutTraining) {
  expect_as_usual(&make_convnet, kImageSample, [](auto& optimizer, auto& model, const auto& batch) {
    model->forward(batch.inputs);  // no backward pass
    {
      const torch::NoGradGuard no_grad;
      model->forward(batch.inputs);
    }
    const auto x = batch.inputs.clone().requires_grad_();
    torch::autograd::grad({model->forward(x).sum()}, {x});
    train_on(optimizer, model, batch);
  });
}

// Dropped gradients discard their captures, however they are dropped.
TEST(Kfac, DropsCapturesWithTheirGradients) {
  expect_as_usual(&make_mlp, kMlpSample, [](auto& optimizer, auto& model, const auto& batch) {
    cross_entropy(model->forward(2 * batch.inputs), batch.targets).backward();
    train_on(optimizer, model, batch);  // begins with its zero_grad()
  });
  expect_as_usual(&make_mlp, kMlpSample, [](auto& optimizer, auto& model, const auto& batch) {
    cross_entropy(model->forward(2 * batch.inputs), batch.targets).backward();
    model->zero_grad();
    cross_entropy(model->forward(batch.inputs), batch.targets).backward();
    optimizer.step();
    model->zero_grad();
  });
  expect_as_usual(&make_mlp, kMlpSample, [](auto& optimizer, auto& model, const auto& batch) {
    optimizer.zero_grad();
    optimizer.step([&] {
      const auto loss = cross_entropy(model->forward(batch.inputs), batch.targets);
      loss.backward();
      return loss;
    });
  });
}

TEST(Kfac, TakesUsesOfAWeightAsPositions) {
  torch::manual_seed(4);
  nn::Linear twice(4, 4);
  nn::Linear once(4, 4);
  twice->to(torch::kDouble);
  once->to(torch::kDouble);
  copy_parameters(*twice, *once);
  const auto options = KFACOptions(0.1).TCov(1).TInv(1);
  KFAC first(*twice, options);
  KFAC second(*once, options);
  for (int step = 0; step < 4; ++step) {
    const auto x = make_batch(step, {4}).inputs;
    const auto y = make_batch(step + 50, {4}).inputs;
    first.zero_grad();
    (twice(x).tanh() + twice(y).tanh()).square().sum(1).mean().backward();
    first.step();
    second.zero_grad();
    once(torch::stack({x, y}, 1)).tanh().sum(1).square().sum(1).mean().backward();
    second.step();
  }
  expect_near_each(twice->parameters(), once->parameters(), 1e-10);
}

TEST(Kfac, SeesLayersThatAreNoModules) {
  struct Net : public nn::Module {
    Net() {
      torch::manual_seed(5);
      w = register_parameter("w", torch::randn({3, 5}, torch::kDouble));
      b = register_parameter("b", torch::randn({3}, torch::kDouble));
    }
    torch::Tensor w, b;
  };
  const auto net = std::make_shared<Net>();
  nn::Linear linear(5, 3);
  linear->to(torch::kDouble);
  copy_parameters(*net, *linear);
  KFAC first(*net, KFACOptions(0.1));
  KFAC second(*linear, KFACOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    const auto batch = make_batch(step, kMlpSample);
    first.zero_grad();
    cross_entropy(torch::linear(batch.inputs, net->w, net->b), batch.targets).backward();
    first.step();
    second.zero_grad();
    cross_entropy(linear(batch.inputs), batch.targets).backward();
    second.step();
  }
  expect_near_each(net->parameters(), linear->parameters(), 1e-12);
  EXPECT_EQ(first.report().preconditioned, (std::vector<std::string>{"w", "b"}));
}

TEST(Kfac, TakesMicroBatchesOfSeveralThreads) {
  expect_as_usual(&make_mlp, kMlpSample, [](auto& optimizer, auto& model, const auto& batch) {
    optimizer.zero_grad();
    std::vector<std::thread> threads;
    for (int part = 0; part < 3; ++part) {
      threads.emplace_back([&, part] {
        const auto output = model->forward(batch.inputs.narrow(0, 2 * part, 2));
        (cross_entropy(output, batch.targets.narrow(0, 2 * part, 2)) / 3).backward();
      });
    }
    for (auto& thread : threads) {
      thread.join();
    }
    optimizer.step();
  });
}

TEST(Kfac, KeepsNoModules) {
  std::weak_ptr<nn::Module> module;
  std::vector<torch::Tensor> params;
  std::unique_ptr<KFAC> optimizer;
  {
    auto model = make_mlp();
    module = model.ptr();
    optimizer = std::make_unique<KFAC>(*model, KFACOptions(0.1));
    train(*optimizer, model, kMlpSample, 0, 1);
  }
  EXPECT_TRUE(module.expired());
  optimizer->zero_grad();
  optimizer->step();
}

// The second layer gets the windows of all samples as rows, as in a Swin Transformer.
TEST(Kfac, NamesALayerWithOtherSamplesThanMost) {
  nn::Sequential model(nn::Linear(4, 5), nn::Linear(5, 5), nn::Linear(5, 3));
  const auto x = torch::randn({4, 3, 2, 4});
  const auto messages_of = [&](bool keeps_batch, const KFACOptions& options) {
    KFAC optimizer(*model, options);
    const Warnings warnings;
    auto h = torch::tanh(model[0]->as<nn::Linear>()->forward(x));
    h = model[1]->as<nn::Linear>()->forward(keeps_batch ? h : h.flatten(0, 1)).view({4, 6, 5});
    const auto outputs = model[2]->as<nn::Linear>()->forward(torch::tanh(h).mean(1));
    if (options.fisher() != "empirical") {
      optimizer.update_curvature(outputs, "cross_entropy");
    }
    cross_entropy(outputs, torch::tensor({0, 1, 2, 0})).backward();
    optimizer.step();
    return warnings.text;
  };
  const std::string message = messages_of(false, KFACOptions(0.1));
  expect_contains(message, "KFAC takes dimension 0 of a layer's input as the samples");
  expect_contains(message, "1 (12 where other layers have 4: 1.weight)");
  expect_contains(message, "Give every layer inputs [batch, ..., features]");
  EXPECT_EQ(messages_of(true, KFACOptions(0.1)), "");
  EXPECT_EQ(messages_of(false, KFACOptions(0.1).fisher("mc")), "");
}

// A weight [in, out], as in the Conv1D of GPT-2, called with positions as further samples.
TEST(Kfac, TakesProductsWithAWeightAsLinearLayers) {
  torch::manual_seed(0);
  nn::Linear linear(4, 3);
  linear->to(torch::kDouble);
  nn::Module transposed;
  const auto w = transposed.register_parameter("w", linear->weight.detach().t().clone());
  const auto b = transposed.register_parameter("b", linear->bias.detach().clone());
  KFAC plain(*linear, KFACOptions(0.1).TCov(1).TInv(2).weight_decay(0.01));
  KFAC ours(transposed, KFACOptions(0.1).TCov(1).TInv(2).weight_decay(0.01));
  const auto x = torch::randn({5, 6, 4}, torch::kDouble);
  const auto train_both = [&] {
    const auto target = torch::ones({5, 6, 3}, torch::kDouble);
    const auto step = [&](auto& optimizer, const auto& output) {
      optimizer.zero_grad();
      torch::mse_loss(output, target).backward();
      optimizer.step();
    };
    step(plain, linear(x));
    step(ours, torch::addmm(b, x.view({-1, 4}), w).view({5, 6, 3}));
    expect_near(w.detach().t(), linear->weight.detach(), 1e-10);
    expect_near(b.detach(), linear->bias.detach(), 1e-10);
  };
  Warnings warnings;
  for (int step = 0; step < 3; ++step) {
    train_both();
  }
  EXPECT_EQ(warnings.text, "");
  EXPECT_EQ(ours.report().preconditioned, (std::vector<std::string>{"w", "b"}));
  const auto archive = saved(ours);
  KFAC loaded(transposed, KFACOptions(0.1));
  load(loaded, archive);
  expect_near(kfac_state(loaded, w).A(), kfac_state(ours, w).A(), 0.0);
  EXPECT_EQ(saved(loaded), archive);
}

}  // namespace
}  // namespace torchium::testing
