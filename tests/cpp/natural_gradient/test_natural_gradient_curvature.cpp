// Natural gradient with matrices that do not come from the gradients of the loss.
// test_parity_capturing.py compares them with Python.
#include "natural_gradient_testing.h"

#include <cmath>

namespace torchium::testing {
namespace {

constexpr const char* kSolvers[] = {"gram", "explicit", "cg"};

NaturalGradientOptions newton(double damping) {
  return NaturalGradientOptions(1.0).momentum(0.0).damping(damping).eps(1e-13);
}

TEST(NaturalGradientCurvature, FollowsTheDenseGaussNewtonMatrix) {
  for (const auto* solver : kSolvers) {
    SCOPED_TRACE(solver);
    auto model = make_mlp();
    const auto batch = make_batch(0, kMlpSample);
    const auto params = model->parameters();
    const auto before = flatten(params);
    const auto f = model->forward(batch.inputs);
    auto F = torch::zeros({before.size(0), before.size(0)}, before.options());
    for (int64_t i = 0; i < f.size(0); ++i) {
      Tensors rows;
      for (int64_t c = 0; c < f.size(1); ++c) {
        rows.push_back(flatten(torch::autograd::grad({f[i][c]}, params, {}, true)));
      }
      const auto J = torch::stack(rows);
      const auto p = f[i].detach().softmax(0);
      F += J.t().mm(torch::diag(p) - torch::outer(p, p)).mm(J) / f.size(0);
    }
    NaturalGradient optimizer(*model, newton(0.01).fisher("ggn").solver(solver));
    const auto outputs = model->forward(batch.inputs);
    optimizer.update_curvature(outputs, "cross_entropy");
    cross_entropy(outputs, batch.targets).backward();
    Tensors gradients;
    for (const auto& param : params) {
      gradients.push_back(param.grad());
    }
    const auto v = flatten(gradients);
    optimizer.step();
    const auto d = torch::linalg_solve(F + 0.01 * torch::eye(v.size(0), v.options()), v);
    expect_near(before - flatten(model->parameters()), d, 1e-9);
    EXPECT_EQ(optimizer.report().solver, solver);
    EXPECT_EQ(optimizer.report().samples, 6);
    EXPECT_EQ(optimizer.report().rows, 18);
  }
}

TEST(NaturalGradientCurvature, SolvesLinearRegressionInOneStep) {
  const auto make = [](const nn::Module& model) {
    return NaturalGradient(model, newton(1e-10).fisher("ggn"));
  };
  expect_linear_regression_in_one_step(make, 1e-6);
}

TEST(NaturalGradientCurvature, NamesTheHeadWithoutOne) {
  TwoHeads model;
  NaturalGradient optimizer(model, newton(0.1).fisher("mc"));
  const auto [first, second] = model.forward(torch::randn({6, 4}, torch::kDouble));
  optimizer.update_curvature(first, "cross_entropy");
  (first.square().mean() + second.square().mean()).backward();
  const auto message = refusal([&] { optimizer.step(); });
  expect_contains(message, "the gradient of 'second.weight'");
  expect_contains(message, "comes from an output of the model that no update_curvature() covers");
}

TEST(NaturalGradientCurvature, AddsUpOutputsOfOneForwardPass) {
  Tensors results;
  for (const bool in_two : {false, true}) {
    auto model = make_mlp();
    NaturalGradient optimizer(*model, newton(0.1).fisher("ggn"));
    const auto outputs = model->forward(make_batch(0, kMlpSample).inputs);
    const auto parts = in_two ? outputs.split(2, 1) : Tensors{outputs};
    for (const auto& part : parts) {
      optimizer.update_curvature(part, "mse", optim::CurvatureOptions().reduction("sum"));
    }
    outputs.square().sum().backward();
    optimizer.step();
    results.push_back(flatten(model->parameters()));
  }
  expect_near(results[1], results[0], 1e-9);
}

TEST(NaturalGradientCurvature, RefusesRowsThatAreNoSamples) {
  nn::Linear model(5, 3);
  NaturalGradient optimizer(*model, newton(0.1).fisher("ggn"));
  const auto outputs = model(torch::ones({4, 2, 5}));
  expect_contains(message_of<c10::ValueError>(
                      [&] { optimizer.update_curvature(outputs.flatten(0, 1), "cross_entropy"); }),
                  "would mix the outputs of one of them");
  const auto windows = model(torch::ones({8, 5})).unflatten(0, {4, 2});
  expect_contains(
      message_of<c10::ValueError>([&] { optimizer.update_curvature(windows.mean(1), "mse"); }),
      "dimension 0 must be the sample in all layers");
}

TEST(NaturalGradientCurvature, IsNeededWhereTheMatrixIsDue) {
  auto model = make_mlp();
  NaturalGradient optimizer(*model, NaturalGradientOptions(0.05).update_freq(2).fisher("mc"));
  train_with_curvature(optimizer, model, 0, 1);
  train_on(optimizer, model, make_batch(1, kMlpSample));  // not due
  const auto params = copies(model->parameters());
  expect_contains(
      message_of<c10::Error>([&] { train_on(optimizer, model, make_batch(2, kMlpSample)); }),
      "update_curvature() was not called");
  expect_equal(copies(model->parameters()), params);
  train_with_curvature(optimizer, model, 2, 3);
  NaturalGradient empirical(*model);
  expect_contains(message_of<c10::Error>([&] {
                    empirical.update_curvature(model->forward(make_batch(0, kMlpSample).inputs),
                                               "mse");
                  }),
                  "needs fisher='mc' or 'ggn', got 'empirical'");
}

TEST(NaturalGradientCurvature, GoesOnFromAnArchive) {
  for (const int update_freq : {1, 3}) {
    auto model = make_mlp();
    const auto options =
        NaturalGradientOptions(0.05).update_freq(update_freq).fisher("ggn").nystrom_rank(3);
    NaturalGradient optimizer(*model, options);
    train_with_curvature(optimizer, model, 0, 2);
    auto twin = make_mlp();
    copy_parameters(*model, *twin);
    NaturalGradient other(*twin);
    load(other, saved(optimizer));
    train_with_curvature(optimizer, model, 2, 6);
    train_with_curvature(other, twin, 2, 6);
    expect_equal(copies(model->parameters()), copies(twin->parameters()));
  }
}

TEST(NaturalGradientJacobian, FollowsTheDenseSolve) {
  for (const auto* solver : kSolvers) {
    SCOPED_TRACE(solver);
    auto model = make_mlp();
    const auto before = flatten(model->parameters());
    Tensors rows;
    for (const auto& param : model->parameters()) {
      auto shape = param.sizes().vec();
      shape.insert(shape.begin(), 8);
      rows.push_back(torch::randn(shape, param.options().requires_grad(false)));
    }
    const auto r = torch::randn({8}, before.options());
    NaturalGradient optimizer(*model, newton(0.01).solver(solver));
    optimizer.update_jacobian(rows, r);
    optimizer.step();
    Tensors flat;
    for (const auto& each : rows) {
      flat.push_back(each.flatten(1));
    }
    const auto J = torch::cat(flat, 1);
    const auto F = J.t().mm(J) / 8 + 0.01 * torch::eye(J.size(1), J.options());
    expect_near(before - flatten(model->parameters()), torch::linalg_solve(F, J.t().mv(r) / 8),
                1e-8);
    expect_contains(refusal([&] { optimizer.update_jacobian({rows[0]}, r); }),
                    "rows must be one tensor per parameter, got 1 for 6 parameters");
    expect_contains(refusal([&] { optimizer.update_jacobian(rows, r.narrow(0, 0, 3)); }),
                    "residuals must be a real floating-point tensor [8]");
  }
}

TEST(NaturalGradientDamping, FollowsTheRatio) {
  const auto options = newton(0.5).lr(0.5).adaptive_damping(true);
  for (const auto& [part, power] :
       {std::pair(0.8, 1), std::pair(0.5, 0), std::pair(0.2, -1), std::pair(-3.0, -1)}) {
    const Problem problem = problems()[0];
    auto model = make_mlp(), twin = make_mlp();
    NaturalGradient optimizer(*model, options), other(*twin, options);
    train(optimizer, problem, *model, 0, 3);
    train(other, problem, *twin, 0, 3);
    const double predicted = 1.0 / other.update_damping(1.0, 0.0);
    EXPECT_GT(predicted, 0.0);
    EXPECT_NEAR(optimizer.update_damping(1.0, 1.0 - part * predicted), part, 1e-9);
    const auto& changed =
        static_cast<const NaturalGradientOptions&>(optimizer.param_groups()[0].options());
    EXPECT_NEAR(changed.damping(), 0.5 * std::pow(0.95, 3 * power), 1e-12);
    expect_contains(refusal([&] { optimizer.update_damping(1.0, 0.5); }),
                    "call it once after step()");
  }
  auto model = make_mlp();
  expect_contains(
      refusal([&] { NaturalGradient(*model, NaturalGradientOptions().adaptive_damping(true)); }),
      "use momentum=0, got 0.9");
}

}  // namespace
}  // namespace torchium::testing
