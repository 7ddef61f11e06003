// PerSample against a loop over the samples, and against per_sample_gradients().
#include "natural_gradient_testing.h"
#include "torchium/gradients.h"

namespace torchium::testing {
namespace {

using gradients::PerSample;

// The rows of a scope are those of dense_jacobian().
void expect_rows(PerSample& scope, const nn::Module& model, const torch::Tensor& jacobian,
                 double tolerance = 1e-10) {
  Tensors flat;
  for (const auto& [name, row] : scope.grad_samples().pairs()) {
    EXPECT_FALSE(row.requires_grad());
    EXPECT_TRUE(scope.grad_sample(model.named_parameters()[name]).is_same(row));
    flat.push_back(row.flatten(1));
  }
  ASSERT_EQ(scope.grad_samples().keys(), model.named_parameters().keys());
  expect_near(torch::cat(flat, 1), jacobian, tolerance);
}

torch::Tensor mean_loss(nn::Sequential& model, const Batch& batch) {
  return cross_entropy(model->forward(batch.inputs), batch.targets);
}

Batch part_of(const Batch& batch, int64_t first, int64_t count) {
  return {batch.inputs.narrow(0, first, count), batch.targets.narrow(0, first, count)};
}

TEST_P(Problems, HavePerSampleGradientsOfBackwardPasses) {
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    const auto model = make(dtype);
    const auto batch = GetParam().batch(0, dtype);
    const auto expected = dense_jacobian(GetParam(), *model, batch);
    for (const std::string reduction : {"mean", "sum"}) {
      SCOPED_TRACE(reduction);
      model->zero_grad();
      PerSample scope(*model, reduction);
      const auto loss = cross_entropy(GetParam().forward(*model, batch.inputs), batch.targets);
      const double factor = reduction == "mean" ? 1.0 : static_cast<double>(batch.inputs.size(0));
      (loss * factor).backward();
      expect_rows(scope, *model, expected, dtype == torch::kDouble ? 1e-10 : 1e-4);
      for (const auto& param : model->named_parameters()) {
        const auto rows = scope.grad_sample(param.key());
        EXPECT_EQ(rows.scalar_type(), dtype);
        expect_near(reduction == "mean" ? rows.mean(0) : rows.sum(0), param.value().grad(),
                    dtype == torch::kDouble ? 1e-10 : 1e-4);
      }
    }
  }
}

class PerSampleScope : public ::testing::Test {
 protected:
  torch::Tensor jacobian(const Batch& batch) {
    return dense_jacobian(problems()[0], *model, batch);
  }
  void run(const Batch& batch) { mean_loss(model, batch).backward(); }

  nn::Sequential model = make_mlp();
  Batch batch = make_batch(0, kMlpSample, 7);
};

TEST_F(PerSampleScope, AgreesWithPerSampleGradients) {
  PerSample scope(*model);
  run(batch);
  const auto expected = per_sample_gradients(
      *model, [&](const torch::Tensor& x) { return model->forward(x); }, &cross_entropy,
      batch.inputs, batch.targets);
  for (const auto& [name, rows] : expected.pairs()) {
    expect_near(scope.grad_sample(name), rows, 1e-12);
  }
}

TEST_F(PerSampleScope, PassesAreMoreSamples) {
  PerSample scope(*model);
  run(part_of(batch, 0, 3));
  expect_rows(scope, *model, jacobian(part_of(batch, 0, 3)));
  run(part_of(batch, 3, 4));
  expect_rows(scope, *model, jacobian(batch));
}

TEST_F(PerSampleScope, PassesOverOneGraphAreTheSameSamples) {
  PerSample scope(*model);
  const auto loss = mean_loss(model, batch);
  loss.backward({}, /*retain_graph=*/true);
  (2.0 * loss).backward();
  expect_rows(scope, *model, 3.0 * jacobian(batch));
}

TEST_F(PerSampleScope, ZeroGradDiscardsThePassesBefore) {
  PerSample scope(*model);
  run(part_of(batch, 0, 2));
  model->zero_grad();
  run(batch);
  expect_rows(scope, *model, jacobian(batch));
}

TEST_F(PerSampleScope, OtherPassesDoNotCount) {
  run(batch);
  const auto before = mean_loss(model, batch);
  PerSample scope(*model);
  before.backward();  // of a forward pass before the scope
  torch::autograd::grad({mean_loss(model, batch)}, model->parameters());
  {
    const torch::NoGradGuard no_grad;
    model->forward(batch.inputs);
  }
  model->forward(batch.inputs);
  run(batch);
  expect_rows(scope, *model, jacobian(batch));
}

TEST_F(PerSampleScope, LeavesOutFrozenParametersAndHasZeroRowsOfUnusedOnes) {
  nn::ModuleList larger(model, nn::Linear(2, 2));
  larger->to(torch::kDouble);
  model->parameters()[0].set_requires_grad(false);
  PerSample scope(*larger);
  run(batch);
  EXPECT_FALSE(scope.grad_samples().contains("0.0.weight"));
  EXPECT_TRUE(torch::equal(scope.grad_sample("1.weight"), torch::zeros({7, 2, 2}, torch::kDouble)));
}

TEST_F(PerSampleScope, HasOneMaskOfDropoutPerSample) {
  nn::Sequential dropping(nn::Linear(5, 8), nn::Dropout(0.5), nn::Linear(8, 3));
  dropping->to(torch::kDouble);
  PerSample scope(*dropping);
  const auto losses = nn::functional::cross_entropy(
      dropping->forward(batch.inputs), batch.targets,
      nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
  losses.mean().backward({}, /*retain_graph=*/true);
  Tensors expected;
  for (int64_t i = 0; i < losses.size(0); ++i) {
    expected.push_back(flatten(torch::autograd::grad({losses[i]}, dropping->parameters(), {},
                                                     /*retain_graph=*/true)));
  }
  expect_rows(scope, *dropping, torch::stack(expected));
}

TEST_F(PerSampleScope, TakesSelfAttentionWithSamplesInDimensionOne) {
  torch::manual_seed(0);
  nn::TransformerEncoderLayer layer(nn::TransformerEncoderLayerOptions(4, 2).dim_feedforward(6));
  layer->to(torch::kDouble);
  layer->eval();
  const auto x = torch::randn({3, 5, 4}, torch::kDouble);
  const auto losses = [&](const torch::Tensor& inputs) {
    return layer->forward(inputs).square().cos().sum(at::IntArrayRef({0, 2}));
  };
  Tensors expected;
  for (int64_t i = 0; i < 5; ++i) {
    expected.push_back(
        flatten(torch::autograd::grad({losses(x.narrow(1, i, 1))}, layer->parameters())));
  }
  PerSample scope(*layer);
  losses(x).mean().backward();
  expect_rows(scope, *layer, torch::stack(expected));
}

TEST_F(PerSampleScope, LeavesNothingBehindAfterAnException) {
  const auto train = [&] {
    PerSample scope(*model);
    run(batch);
    throw std::runtime_error("of the program");
  };
  EXPECT_THROW(train(), std::runtime_error);
  model->zero_grad();
  PerSample scope(*model);
  run(part_of(batch, 0, 2));
  expect_rows(scope, *model, jacobian(part_of(batch, 0, 2)));
}

TEST_F(PerSampleScope, MayEndBeforeItsBackwardPass) {
  torch::Tensor loss;
  {
    const PerSample scope(*model);
    loss = mean_loss(model, batch);
  }
  loss.backward();
  EXPECT_TRUE(model->parameters()[0].grad().defined());
}

template <typename Model>
std::string refusal_of(Model model, const std::string& reduction = "mean") {
  return refusal([&] { const PerSample scope(*model, reduction); });
}

TEST_F(PerSampleScope, RefusesModels) {
  expect_contains(refusal_of(nn::Sequential(nn::Linear(4, 3), nn::BatchNorm1d(3))),
                  "layer '1' (BatchNorm1d) normalises with the statistics of the batch");
  expect_contains(refusal_of(nn::Sequential(nn::Linear(4, 4), nn::PReLU())),
                  "layer '1' (PReLU) with the parameter '1.weight' is of an unsupported type; "
                  "freeze its parameters (requires_grad_(false)), or call per_sample_gradients()");
  expect_contains(refusal_of(nn::LSTM(4, 3)), "the model (LSTM) with the parameter 'weight_ih_l0'");
  nn::Linear frozen(4, 3);
  frozen->weight.set_requires_grad(false);
  frozen->bias.set_requires_grad(false);
  expect_contains(refusal_of(frozen), "no parameter of the model requires a gradient");
  expect_contains(refusal_of(model, "none"), "reduction is 'none'; it must be 'mean' or 'sum'");
}

// [n, ...] -> [n, 3]
using Pass = std::function<torch::Tensor(const torch::Tensor&)>;

std::string refusal_of_pass(const nn::Module& model, const Pass& pass, torch::IntArrayRef shape) {
  PerSample scope(model);
  pass(torch::randn(shape, torch::kDouble)).square().mean().backward();
  return refusal([&] { scope.grad_samples(); });
}

TEST_F(PerSampleScope, RefusesPasses) {
  nn::Linear a(4, 4);
  nn::Linear b(4, 3);
  nn::Embedding positions(4, 4);
  nn::ModuleList layers(a, b, positions);
  layers->to(torch::kDouble);
  expect_contains(
      refusal_of_pass(*layers, [&](const auto& x) { return b(a(x)) + a->weight.sum(); }, {5, 4}),
      "the loss depends on the parameter '0.weight' not only by the operators");
  expect_contains(refusal_of_pass(*layers,
                                  [&](const auto& x) {
                                    return torch::batch_norm(a(x), {}, {}, {}, {}, true, 0, 1e-5,
                                                             false);
                                  },
                                  {5, 4}),
                  "batch_norm normalised with the statistics of the batch");
  const auto folded = [&](const auto& x) { return b(a(x.reshape({-1, 4})).view_as(x).sum(1)); };
  const auto counts = refusal_of_pass(*layers, folded, {5, 2, 4});
  expect_contains(counts, "the layer of '1.weight' has seen 5 samples in dimension 0 of its input");
  expect_contains(counts, "the layer of '0.weight' 10");
  expect_contains(
      refusal_of_pass(
          *layers, [&](const auto& x) { return a(x + positions(torch::arange(2)).unsqueeze(0)); },
          {5, 2, 4}),
      "the layer of '2.weight'");
  const auto looked_up = [&](const auto& x) {
    return positions(torch::arange(3).expand({3, 3})) + positions(torch::arange(3)) + x;
  };
  expect_contains(refusal_of_pass(*layers, looked_up, {3, 3, 4}),
                  "has looked up 3 indices, which may be samples or positions");
}

TEST_F(PerSampleScope, RefusesUses) {
  const auto late = mean_loss(model, batch);
  PerSample scope(*model);
  late.backward();
  expect_contains(refusal([&] { scope.grad_samples(); }), "no backward pass of a batch");
  run(batch);
  EXPECT_EQ(scope.grad_samples().size(), 6);
  expect_contains(refusal([&] { scope.grad_sample("0.wheight"); }),
                  "the model has no trainable parameter '0.wheight'");
  expect_contains(refusal([&] { scope.grad_sample(batch.inputs); }),
                  "the tensor is not a trainable parameter of the model");
  run(batch);
  batch.inputs.zero_();
  expect_contains(refusal([&] { scope.grad_samples(); }),
                  "changed in place after the backward pass");
}

TEST_F(PerSampleScope, RefusesParametersThatBecomeTrainable) {
  auto weight = model->parameters()[0];
  weight.set_requires_grad(false);
  PerSample scope(*model);
  weight.set_requires_grad(true);
  run(batch);
  expect_contains(refusal([&] { scope.grad_samples(); }),
                  "the parameter '0.weight' has become trainable after");
}

TEST_F(PerSampleScope, KeepsTheRowsOfParametersThatAreFrozen) {
  PerSample scope(*model);
  run(batch);
  const auto expected = jacobian(batch);
  model->parameters()[0].set_requires_grad(false);
  expect_rows(scope, *model, expected);
}

}  // namespace
}  // namespace torchium::testing
