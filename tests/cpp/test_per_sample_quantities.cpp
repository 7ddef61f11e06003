// Arguments of what is computed from per-sample gradients.
#include "per_sample_testing.h"

#include <limits>

namespace torchium::testing {
namespace {

struct QuantitiesCase {
  nn::Sequential model = make_mlp();
  Batch batch = make_batch(0, kMlpSample);
  ForwardFunction forward = [this](const torch::Tensor& x) { return model->forward(x); };
  LossFunction loss = &cross_entropy;
  torch::OrderedDict<std::string, torch::Tensor> ones() {
    torch::OrderedDict<std::string, torch::Tensor> result;
    for (const auto& [name, param] : model->named_parameters().pairs()) {
      result.insert(name, torch::ones_like(param.detach()));
    }
    return result;
  }
  torch::Tensor norms(int64_t workspace) {
    return gradients::per_sample_norms(*model, forward, loss, batch.inputs, batch.targets,
                                       workspace);
  }
  torch::Tensor clip(double max_norm) {
    return gradients::clip_and_accumulate(*model, forward, loss, batch.inputs, batch.targets,
                                          max_norm);
  }
  torch::Tensor dots(const torch::OrderedDict<std::string, torch::Tensor>& vectors) {
    return gradients::jvp_dots(*model, forward, loss, batch.inputs, batch.targets, vectors);
  }
};

TEST(PerSampleQuantities, RefuseWrongArguments) {
  QuantitiesCase c;
  expect_contains(refusal([&] { c.norms(0); }), "max_workspace_bytes is 0; it must be positive");
  for (const double wrong : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    expect_contains(refusal([&] { c.clip(wrong); }), "it must be positive");
  }
  auto vectors = c.ones();
  const auto first = vectors.keys()[0];
  vectors.insert("nine", torch::ones({1}));
  expect_contains(refusal([&] { c.dots(vectors); }), "'nine', which is no trainable parameter");
  expect_contains(refusal([&] { c.dots(torch::OrderedDict<std::string, torch::Tensor>()); }),
                  "no entry '" + first + "'; pass zeros");
  vectors = c.ones();
  vectors[first] = torch::ones({1});
  expect_contains(refusal([&] { c.dots(vectors); }), "it must be a tensor of shape");
  for (auto& param : c.model->parameters()) {
    EXPECT_FALSE(param.grad().defined());
    param.set_requires_grad(false);
  }
  expect_contains(refusal([&] { c.norms(1); }), "no parameter of the model requires a gradient");
}

TEST(PerSampleQuantities, AddToGradients) {
  QuantitiesCase c;
  c.clip(0.1);
  Tensors once;
  for (const auto& param : c.model->parameters()) {
    once.push_back(param.grad().clone());
  }
  c.clip(0.1);
  for (size_t i = 0; i < once.size(); ++i) {
    expect_near(c.model->parameters()[i].grad(), 2 * once[i], 1e-12);
  }
}

TEST(PerSampleQuantities, RefuseNormalisationOfABatch) {
  nn::Sequential model(nn::Linear(5, 3), nn::BatchNorm1d(3));
  const auto batch = make_batch(0, kMlpSample, 6, torch::kFloat);
  const auto message = refusal([&] {
    gradients::clip_and_accumulate(
        *model, [&](const torch::Tensor& x) { return model->forward(x); }, &cross_entropy,
        batch.inputs, batch.targets, 1.0);
  });
  expect_contains(message, "layer '1' (BatchNorm1d) normalises with the statistics of the batch");
  EXPECT_FALSE(model->parameters()[0].grad().defined());
}

}  // namespace
}  // namespace torchium::testing
