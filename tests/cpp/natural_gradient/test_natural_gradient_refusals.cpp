// Errors of natural gradient for layers, batches, gradients and options.
#include "natural_gradient_testing.h"

namespace torchium::testing {
namespace {

using torch::optim::OptimizerParamGroup;

TEST(NaturalGradientTest, RefusesUnsupportedLayersByName) {
  const auto refuses = [](nn::Sequential model, const std::string& part) {
    expect_contains(refusal([&] { NaturalGradient optimizer(*model); }), part);
    for (auto& param : model->parameters()) {
      param.set_requires_grad(false);
    }
    NaturalGradient optimizer(*model);  // supported
  };
  refuses(nn::Sequential(nn::Linear(2, 3), nn::LSTM(3, 4)), "layer '1' (LSTM)");
  refuses(nn::Sequential(nn::GRU(3, 4)), "layer '0' (GRU)");
  refuses(nn::Sequential(nn::RNN(3, 4)), "layer '0' (RNN)");
  refuses(nn::Sequential(nn::LSTMCell(3, 4)), "layer '0' (LSTMCell)");
  refuses(
      nn::Sequential(nn::MultiheadAttention(nn::MultiheadAttentionOptions(4, 2).kdim(3).vdim(3))),
      "layer '0' (MultiheadAttention), which has kdim or vdim");
  refuses(nn::Sequential(nn::BatchNorm2d(3)), "layer '0' (BatchNorm2d)");
  refuses(nn::Sequential(nn::PReLU()), "layer '0' (PReLU), which is of an unsupported type");
  refuses(nn::Sequential(nn::Bilinear(2, 3, 4)), "layer '0' (Bilinear)");
  refuses(nn::Sequential(nn::EmbeddingBag(3, 4)), "layer '0' (EmbeddingBag)");
  refuses(nn::Sequential(nn::Embedding(nn::EmbeddingOptions(3, 4).sparse(true))),
          "layer '0' (Embedding), which has sparse = true");
  refuses(nn::Sequential(nn::Embedding(nn::EmbeddingOptions(3, 4).max_norm(1.0))), "max_norm");
  refuses(nn::Sequential(nn::Embedding(nn::EmbeddingOptions(3, 4).scale_grad_by_freq(true))),
          "scale_grad_by_freq = true");
}

// Each error leaves parameters and state unchanged, and the next step succeeds.
void expect_refused_step(nn::Module& model, const std::function<torch::Tensor()>& loss,
                         const std::string& part) {
  NaturalGradient optimizer(model, NaturalGradientOptions(0.1));
  const auto before = copies(model.parameters());
  loss().backward();
  expect_contains(refusal([&] { optimizer.step(); }), part);
  expect_equal(copies(model.parameters()), before);
  EXPECT_EQ(optimizer.state().size(), 0U);
}

TEST(NaturalGradientTest, RefusesBatchNormInTraining) {
  nn::BatchNorm1d norm(nn::BatchNorm1dOptions(4).affine(false));
  nn::Sequential model(nn::Linear(5, 4), norm, nn::Linear(4, 3));
  const auto loss = [&] {
    const auto batch = make_batch(0, kMlpSample, 6, torch::kFloat);
    return cross_entropy(model->forward(batch.inputs), batch.targets);
  };
  expect_refused_step(*model, loss, "layer '1' (BatchNorm1d) normalises with the statistics");
  nn::BatchNorm1d alone(3);
  const LossFunction mean = [](const auto& y, const auto&) { return y.mean(); };
  const ForwardFunction forward = [&](const auto& x) { return alone->forward(x); };
  expect_contains(
      refusal([&] {
        per_sample_gradients(*alone, forward, mean, torch::ones({2, 3}), torch::ones({2}));
      }),
      "the model (BatchNorm1d) normalises with the statistics");
  norm->eval();
  NaturalGradient optimizer(*model, NaturalGradientOptions(0.1));
  loss().backward();
  optimizer.step();
  EXPECT_EQ(optimizer.report().samples, 6);
}

TEST(NaturalGradientTest, RefusesBatchNormThatIsAFunctionCall) {
  nn::Sequential model(nn::Linear(5, 4), nn::Linear(4, 3));
  const auto loss = [&](bool training) {
    const auto batch = make_batch(0, kMlpSample, 6, torch::kFloat);
    const auto x = model[0]->as<nn::Linear>()->forward(batch.inputs);
    const auto y = torch::batch_norm(x, {}, {}, torch::zeros({4}), torch::ones({4}), training, 0.1,
                                     1e-5, /*cudnn_enabled=*/false);
    return cross_entropy(model[1]->as<nn::Linear>()->forward(y), batch.targets);
  };
  expect_refused_step(
      *model, [&] { return loss(true); }, "batch_norm() with training = true");
  NaturalGradient optimizer(*model, NaturalGradientOptions(0.1));
  loss(false).backward();
  optimizer.step();
  const auto batch = make_batch(0, kMlpSample, 6, torch::kFloat);
  optimizer.zero_grad();
  const auto images = model[0]->as<nn::Linear>()->forward(batch.inputs).view({6, 2, 2, 1});
  const auto normalised = torch::instance_norm(images, {}, {}, {}, {}, true, 0.1, 1e-5, false);
  cross_entropy(model[1]->as<nn::Linear>()->forward(normalised.flatten(1)), batch.targets)
      .backward();
  optimizer.step();
}

TEST(NaturalGradientTest, RefusesGradientsFromElsewhere) {
  struct Net : public nn::Module {
    Net() {
      linear = register_module("linear", nn::Linear(5, 3));
      scale = register_parameter("scale", torch::ones({3}));
    }
    nn::Linear linear{nullptr};
    torch::Tensor scale;
  };
  Net net;
  const auto batch = make_batch(0, kMlpSample, 6, torch::kFloat);
  expect_refused_step(
      net, [&] { return cross_entropy(net.linear(batch.inputs) * net.scale, batch.targets); },
      "the gradient of 'scale', parameter 0 of group 0 (shape [3]) does not come from");
}

TEST(NaturalGradientTest, RefusesSamplesInOtherDimensions) {
  nn::Sequential model(nn::Linear(5, 4), nn::Linear(4, 3));
  expect_refused_step(
      *model,
      [&] {
        const auto x = model[0]->as<nn::Linear>()->forward(torch::randn({6, 2, 5}));
        return model[1]->as<nn::Linear>()->forward(x.transpose(0, 1)).square().mean();
      },
      "has seen 2 samples in dimension 0 of its input, the layer of '0.weight'");

  nn::Module embeddings;
  nn::Embedding tokens = embeddings.register_module("tokens", nn::Embedding(9, 4));
  nn::Embedding positions = embeddings.register_module("positions", nn::Embedding(3, 4));
  expect_refused_step(
      embeddings,
      [&] {
        const auto x = tokens(torch::randint(9, {3, 3}, torch::kLong));
        return (x + positions(torch::arange(3))).square().mean();
      },
      "has looked up 3 indices, which may be samples or positions: the layer of 'tokens.weight'");
}

TEST(NaturalGradientTest, RefusesStepsWithoutCapture) {
  auto model = make_mlp();
  const auto batch = make_batch(0, kMlpSample);
  const auto loss = cross_entropy(model->forward(batch.inputs), batch.targets);
  NaturalGradient optimizer(*model);  // too late
  loss.backward();
  expect_contains(refusal([&] { optimizer.step(); }), "has captured no backward pass");
  auto x = batch.inputs.clone();
  optimizer.zero_grad();
  cross_entropy(model->forward(x), batch.targets).backward();
  x.zero_();
  expect_contains(refusal([&] { optimizer.step(); }), "was changed in place after the backward");
}

TEST(NaturalGradientTest, SkipsStepsThatAreNotFinite) {
  const Problem problem = problems()[0];
  for (const int64_t update_freq : {1, 2}) {
    const auto options = NaturalGradientOptions(0.05).momentum(0.5).update_freq(update_freq);
    auto model = make_mlp();
    auto clean_model = make_mlp();
    NaturalGradient optimizer(*model, options);
    NaturalGradient clean(*clean_model, options);
    const auto poisoned = [&] {
      auto batch = problem.batch(7, torch::kDouble);
      batch.inputs[0][0] = kNaN;
      train_step(optimizer, problem, *model, batch);
    };
    poisoned();
    train(optimizer, problem, *model, 0, 3);
    train(clean, problem, *clean_model, 0, 3);
    expect_equal(copies(model->parameters()), copies(clean_model->parameters()));
    poisoned();
    poisoned();
    expect_contains(message_of<c10::Error>(poisoned), "3 steps in a row");
    expect_equal(copies(model->parameters()), copies(clean_model->parameters()));
  }
}

TEST(NaturalGradientTest, RefusesWrongOptions) {
  const nn::Linear model(2, 2);
  const auto refuses = [&](const NaturalGradientOptions& options, const std::string& part) {
    expect_contains(refusal([&] { NaturalGradient optimizer(*model, options); }), part);
  };
  refuses(NaturalGradientOptions(-1.0), "lr must be a finite number in [0, 3.40282e+38], got -1");
  refuses(NaturalGradientOptions(1e39),
          "lr must be a finite number in [0, 3.40282e+38], got 1e+39");
  refuses(NaturalGradientOptions().damping(0.0),
          "damping must be a finite number in (0, inf), got 0.0");
  refuses(NaturalGradientOptions().update_freq(0),
          "update_freq must be an integer of at least 1, got 0");
  refuses(NaturalGradientOptions().eps(0.0), "eps must be a finite number in (0, inf), got 0.0");
  refuses(NaturalGradientOptions().momentum(1.0),
          "momentum must be a finite number in [0, 1), got 1.0");
  refuses(NaturalGradientOptions().max_norm(-1.0), "max_norm");
  refuses(NaturalGradientOptions().solver("lu"),
          "solver must be one of 'auto', 'gram', 'explicit', 'cg', got 'lu'");
  const auto params = model->parameters();
  for (const auto& [options, name] : std::vector<std::pair<NaturalGradientOptions, std::string>>{
           {NaturalGradientOptions().update_freq(2), "update_freq"},
           {NaturalGradientOptions().eps(1e-6), "eps"},
           {NaturalGradientOptions().max_norm(1.0), "max_norm"},
           {NaturalGradientOptions().solver("cg"), "solver"}}) {
    const std::vector<OptimizerParamGroup> groups{
        OptimizerParamGroup({params[0]}),
        OptimizerParamGroup({params[1]}, std::make_unique<NaturalGradientOptions>(options))};
    expect_contains(refusal([&] { NaturalGradient optimizer(*model, groups); }),
                    name + " must be the same in all parameter groups of NaturalGradient");
  }
}

}  // namespace
}  // namespace torchium::testing
