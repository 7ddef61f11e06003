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

// As Poisson sampling draws it.
TEST(PerSampleQuantities, ClipAnEmptyBatch) {
  QuantitiesCase c;
  c.batch = {c.batch.inputs.narrow(0, 0, 0), c.batch.targets.narrow(0, 0, 0)};
  expect_contains(refusal([&] { c.norms(1); }), "at least one");
  EXPECT_EQ(c.clip(0.1).sizes(), torch::IntArrayRef{0});
  for (const auto& param : c.model->parameters()) {
    EXPECT_TRUE(param.grad().equal(torch::zeros_like(param)));
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

// `of` returns the losses of a batch, or one of them.
int calls_of_loss(QuantitiesCase& c, const LossFunction& of) {
  int calls = 0;
  c.loss = [&](const torch::Tensor& output, const torch::Tensor& target) {
    ++calls;
    return of(output, target);
  };
  const auto forward = c.forward;
  const auto rows =
      per_sample_gradients(*c.model, forward, c.loss, c.batch.inputs, c.batch.targets);
  const int found = calls;
  for (int64_t i = 0; i < c.batch.inputs.size(0); ++i) {
    c.model->zero_grad();
    of(forward(c.batch.inputs.narrow(0, i, 1)), c.batch.targets.narrow(0, i, 1)).sum().backward();
    for (const auto& [name, param] : c.model->named_parameters().pairs()) {
      expect_near(rows[name][i], param.grad(), 1e-10);
    }
  }
  return found;
}

torch::Tensor losses_of(const torch::Tensor& output, const torch::Tensor& target) {
  return nn::functional::cross_entropy(
      output, target, nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
}

// At most for the batch, two halves, under vmap, and for the first sample alone. Most losses would
// be others for a batch.
TEST(PerSampleQuantities, EvaluateLossesOfABatchAtOnce) {
  const std::vector<std::pair<std::string, LossFunction>> losses = {
      {"each", &losses_of},
      {"mean", &cross_entropy},
      {"divided by the batch size",
       [](const auto& y, const auto& t) { return losses_of(y, t) / y.size(0); }},
      {"over the largest",
       [](const auto& y, const auto& t) {
         const auto values = losses_of(y, t);
         return values * values / values.detach().max();
       }},
      {"by position",
       [](const auto& y, const auto& t) {
         return losses_of(y, t) * torch::arange(1, y.size(0) + 1, y.options());
       }},
      {"times the sum", [](const auto& y, const auto& t) { return y.sum() * (t + 1); }},
      {"of single samples only",
       [](const auto& y, const auto& t) {
         TORCH_CHECK(y.size(0) == 1);
         return losses_of(y, t);
       }},
      {"of the output alone", [](const auto& y, const auto&) { return y.square().mean(); }},
      {"with another operator", [](const auto& y, const auto& t) {
         return torch::cdist(y.unsqueeze(0), y.new_ones({1, 2, y.size(1)})).sum() + t.sum();
       }}};
  for (const auto& [name, loss] : losses) {
    SCOPED_TRACE(name);
    QuantitiesCase c;
    EXPECT_LE(calls_of_loss(c, loss), 5);
  }
}

TEST(PerSampleQuantities, EvaluateLossesThatReadValuesOneByOne) {
  QuantitiesCase c;
  const LossFunction loss = [](const auto& y, const auto& t) {
    return losses_of(y, t) * (t.template item<int64_t>() + 1);
  };
  EXPECT_GT(calls_of_loss(c, loss), c.batch.inputs.size(0));
}

TEST(PerSampleQuantities, LossesOfBatchesOfOneMustBeOneNumber) {
  QuantitiesCase c;
  c.loss = [](const auto& y, const auto&) { return y; };
  expect_contains(refusal([&] { c.norms(1); }), "for one sample; it must return one number");
  c.loss = [](const auto& y, const auto&) { return torch::dropout(y, 0.5, true).sum(); };
  expect_contains(refusal([&] { c.norms(1); }), "draws random numbers");
}

// A layer whose samples are taken one by one: gradients that do not fit are computed again.
TEST(PerSampleQuantities, GramIsTheSameInChunks) {
  torch::manual_seed(4);
  nn::LSTM lstm(nn::LSTMOptions(4, 3).batch_first(true));
  lstm->to(torch::kDouble);
  const int64_t samples = 5;
  const auto batch = make_batch(0, {2, 4}, samples);
  int64_t evaluated = 0;
  const ForwardFunction forward = [&](const torch::Tensor& x) {
    ++evaluated;
    return std::get<0>(lstm->forward(x)).mean(1);
  };
  int64_t bytes = 0;
  for (const auto& param : lstm->parameters()) {
    bytes += param.nbytes();
  }
  const auto gram = [&](int64_t workspace) {
    evaluated = 0;
    return gradients::gram(*lstm, forward, &cross_entropy, batch.inputs, batch.targets, workspace);
  };
  const auto whole = gradients::gram(*lstm, forward, &cross_entropy, batch.inputs, batch.targets);
  EXPECT_EQ(evaluated, samples);
  for (const auto& [rows, evaluations] :
       {std::pair<int64_t, int64_t>{1, 15}, {2, 9}, {3, 7}, {5, 5}}) {
    SCOPED_TRACE(rows);
    expect_near(gram(rows * bytes), whole, 1e-12);
    EXPECT_EQ(evaluated, evaluations);
  }
  expect_near(gram(1), whole, 1e-12);
  expect_contains(refusal([&] { gram(0); }), "max_workspace_bytes is 0; it must be positive");
  torch::OrderedDict<std::string, torch::Tensor> none;
  expect_contains(refusal([&] {
                    gradients::jvp_dots(*lstm, forward, &cross_entropy, batch.inputs, batch.targets,
                                        none, -1);
                  }),
                  "max_workspace_bytes is -1; it must be positive");
}

}  // namespace
}  // namespace torchium::testing
