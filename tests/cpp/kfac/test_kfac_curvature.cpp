// K-FAC's factors from the curvature of the loss. test_parity_capturing.py compares them with
// Python.
#include "kfac_testing.h"

namespace torchium::testing {
namespace {

using optim::CurvatureOptions;

// One step is the direction itself.
KFACOptions bare(const std::string& fisher) {
  return KFACOptions(1.0).momentum(0.0).kl_clip(std::nullopt).fisher(fisher);
}

TEST(KfacCurvature, SolvesLinearRegressionInOneStep) {
  const auto make = [](const nn::Module& model) {
    return KFAC(model, bare("ggn").damping(0.0).eps(1e-14).damping_split("exact"));
  };
  expect_linear_regression_in_one_step(make, 1e-10);
}

TEST(KfacCurvature, HasTheHessianOfTheLossAsFactor) {
  auto model = make_mlp();
  KFAC optimizer(*model, bare("ggn"));
  const auto batch = make_batch(0, kMlpSample);
  const auto outputs = model->forward(batch.inputs);
  optimizer.update_curvature(outputs, "cross_entropy");
  const auto p = outputs.detach().softmax(1);
  cross_entropy(outputs, batch.targets).backward();
  const auto weight = model->parameters()[4];
  optimizer.step();
  const auto H = torch::diag(p.mean(0)) - p.t().mm(p) / p.size(0);
  expect_near(kfac_state(optimizer, weight).G()[0], H, 1e-12);
}

TEST(KfacCurvature, AddsUpOutputsOfOneForwardPass) {
  std::vector<Tensors> factors;
  for (const bool in_two : {false, true}) {
    auto model = make_mlp();
    KFAC optimizer(*model, bare("ggn"));
    const auto outputs = model->forward(make_batch(0, kMlpSample).inputs);
    const auto parts = in_two ? outputs.split(2, 1) : Tensors{outputs};
    for (const auto& part : parts) {
      optimizer.update_curvature(part, "mse", CurvatureOptions().reduction("sum"));
    }
    outputs.square().sum().backward();
    optimizer.step();
    const auto& state = kfac_state(optimizer, model->parameters()[0]);
    factors.push_back({state.A(), state.G()});
  }
  for (const size_t i : {0, 1}) {
    expect_near(factors[1][i], factors[0][i], 1e-12);
  }
}

TEST(KfacCurvature, ScalesTheHessianOfAHeadByAWeight) {
  TwoHeads model;
  const auto x = make_batch(0, {4}).inputs;
  const auto G = [&](const std::vector<double>& weights) {
    KFAC optimizer(model, bare("ggn").lr(0.0));
    const auto [first, second] = model.forward(x);
    const Tensors outputs{first, second};
    for (const size_t i : {0, 1}) {
      if (weights[i] > 0.0) {
        const auto scaled = outputs[i].detach().lerp(outputs[i], std::sqrt(weights[i]));
        optimizer.update_curvature(scaled, "cross_entropy");
      }
    }
    (first.sum() + second.sum()).backward();
    const Warnings warnings;
    optimizer.step();
    return kfac_state(optimizer, model.trunk->weight).G();
  };
  expect_near(G({1.0, 0.3}), G({1.0, 0.0}) + 0.3 * G({0.0, 1.0}), 1e-12);
}

TEST(KfacCurvature, NamesTheHeadWithoutOne) {
  TwoHeads model;
  KFAC optimizer(model, KFACOptions(0.1).fisher("mc"));
  const auto [first, second] = model.forward(torch::randn({6, 4}, torch::kDouble));
  optimizer.update_curvature(first, "cross_entropy");
  (first.square().mean() + second.square().mean()).backward();
  Warnings warnings;
  optimizer.step();
  expect_contains(warnings.text,
                  "2 (no update_curvature() covers its outputs: second.weight, second.bias)");
  expect_contains(warnings.text,
                  "give each one that the loss uses an update_curvature(outputs, loss)");
  const auto report = optimizer.report();
  EXPECT_EQ(report.fallback, (std::vector<std::string>{"second.weight", "second.bias"}));
  EXPECT_EQ(report.parameters.back().detail, "no update_curvature() covers its outputs");
}

TEST(KfacCurvature, LeavesGradientsAndTheGraphAlone) {
  auto model = make_mlp();
  auto plain = make_mlp();
  KFAC optimizer(*model, bare("ggn"));
  const auto batch = make_batch(0, kMlpSample);
  cross_entropy(plain->forward(batch.inputs), batch.targets).backward();
  const auto outputs = model->forward(batch.inputs);
  for (int call = 0; call < 2; ++call) {
    optimizer.update_curvature(outputs, "cross_entropy");
    for (const auto& param : model->parameters()) {
      EXPECT_FALSE(param.grad().defined());
    }
  }
  cross_entropy(outputs, batch.targets).backward();
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_TRUE(torch::equal(model->parameters()[i].grad(), plain->parameters()[i].grad()));
  }
}

TEST(KfacCurvature, IsNeededWhereFactorsAreDue) {
  auto model = make_mlp();
  KFAC optimizer(*model, KFACOptions(0.05).TCov(2).fisher("mc"));
  train_with_curvature(optimizer, model, 0, 1);
  train_on(optimizer, model, make_batch(1, kMlpSample));  // not due
  const auto before = all_state(optimizer);
  const auto params = copies(model->parameters());
  expect_contains(
      message_of<c10::Error>([&] { train_on(optimizer, model, make_batch(2, kMlpSample)); }),
      "update_curvature() was not called");
  expect_equal(all_state(optimizer), before);
  expect_equal(copies(model->parameters()), params);
  train_with_curvature(optimizer, model, 2, 3);
}

TEST(KfacCurvature, RefusesWhatDoesNotFit) {
  auto model = make_mlp();
  const auto batch = make_batch(0, kMlpSample);
  KFAC empirical(*model);
  expect_contains(message_of<c10::Error>(
                      [&] { empirical.update_curvature(model->forward(batch.inputs), "mse"); }),
                  "needs fisher='mc' or 'ggn', got 'empirical'");
  KFAC optimizer(*model, bare("mc"));
  const auto outputs = model->forward(batch.inputs);
  const auto refuses = [&](const std::string& loss, const CurvatureOptions& options,
                           const std::string& part) {
    expect_contains(
        message_of<c10::ValueError>([&] { optimizer.update_curvature(outputs, loss, options); }),
        part);
  };
  refuses("nll", {}, "loss must be one of 'cross_entropy', 'mse', 'bce', got 'nll'");
  refuses("mse", CurvatureOptions().class_dim(1), "class_dim is for loss='cross_entropy'");
  refuses("mse", CurvatureOptions().reduction("none"), "reduction must be one of 'mean', 'sum'");
  refuses("mse", CurvatureOptions().mask(torch::ones({6})), "mask must be a bool tensor");
  refuses("mse", CurvatureOptions().samples(0), "samples must be an integer of at least 1, got 0");
  expect_contains(
      message_of<c10::ValueError>([&] { optimizer.update_curvature(outputs.detach(), "mse"); }),
      "do not require gradients");
  outputs.sum().backward();
  expect_contains(
      message_of<c10::Error>([&] { optimizer.update_curvature(outputs, "cross_entropy"); }),
      "call update_curvature() before it");
}

TEST(KfacCurvature, RefusesRowsOfSeveralOutputs) {
  nn::Linear model(5, 3);
  const auto outputs_of = [&] { return model(torch::ones({4, 2, 5})).flatten(0, 1); };
  for (const auto& options :
       {bare("ggn").weight_sharing("reduce"), bare("ggn").ekfac(true).damping_split("exact")}) {
    KFAC optimizer(*model, options);
    expect_contains(message_of<c10::ValueError>(
                        [&] { optimizer.update_curvature(outputs_of(), "cross_entropy"); }),
                    "would mix the outputs of one of them");
  }
  KFAC optimizer(*model, bare("ggn"));
  optimizer.update_curvature(outputs_of(), "cross_entropy");
}

TEST(KfacCurvature, RefusesAnInputThatWasChanged) {
  nn::Linear model(5, 3);
  KFAC optimizer(*model, bare("ggn"));
  const auto x = torch::ones({2, 5});
  const auto outputs = model(x);
  x.add_(1);
  expect_contains(message_of<c10::Error>([&] { optimizer.update_curvature(outputs, "mse"); }),
                  "was changed in place");
}

TEST(KfacCurvature, GoesOnFromAnArchive) {
  auto model = make_mlp();
  KFAC optimizer(*model, KFACOptions(0.05).TCov(2).TInv(3).fisher("mc"));
  train_with_curvature(optimizer, model, 0, 3);
  auto twin = make_mlp();
  copy_parameters(*model, *twin);
  KFAC other(*twin);
  load(other, saved(optimizer));
  train_with_curvature(optimizer, model, 3, 7);
  train_with_curvature(other, twin, 3, 7);
  expect_equal(copies(model->parameters()), copies(twin->parameters()));
}

}  // namespace
}  // namespace torchium::testing
