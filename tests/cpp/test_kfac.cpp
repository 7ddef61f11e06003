// K-FAC on stock torch::nn models. test_parity.py compares it with the Python optimizer.
#include "model_testing.h"
#include "torchium/optim/kfac.h"

#include <cmath>
#include <map>
#include <thread>

namespace torchium::testing {
namespace {

using optim::KFAC;
using optim::KFACOptions;
using optim::KFACParamState;
using torch::optim::OptimizerParamGroup;

const KFACParamState& kfac_state(const KFAC& optimizer, const torch::Tensor& param) {
  return static_cast<const KFACParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

// Steps first..last-1, each on its own batch.
void train(KFAC& optimizer, nn::Sequential& model, torch::IntArrayRef sample, int first, int last) {
  const auto dtype = model->parameters()[0].scalar_type();
  for (int step = first; step < last; ++step) {
    train_on(optimizer, model, make_batch(step, sample, 6, dtype));
  }
}

void expect_near_each(const Tensors& actual, const Tensors& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    SCOPED_TRACE(i);
    expect_near(actual[i].detach(), expected[i].detach(), tolerance);
  }
}

// ---- the mathematics

torch::Tensor with_ones(const torch::Tensor& a) {
  return torch::cat({a, torch::ones({a.size(0), 1}, a.options())}, 1);
}

// (G (x) A + ...)^-1 V for one layer, by solves with dense matrices.
torch::Tensor reference_direction(const torch::Tensor& A, const torch::Tensor& G,
                                  const torch::Tensor& V, double damping,
                                  const std::string& split) {
  const auto I_A = torch::eye(A.size(0), A.options());
  const auto I_G = torch::eye(G.size(0), G.options());
  if (split == "exact") {
    const auto F = torch::kron(G, A) + damping * torch::eye(V.numel(), V.options());
    return torch::linalg_solve(F, V.reshape({-1})).view_as(V);
  }
  const double pi =
      split == "plain" ? 1.0
                       : std::sqrt(A.diag().mean().item<double>() / G.diag().mean().item<double>());
  const auto left = torch::linalg_solve(G + std::sqrt(damping) / pi * I_G, V);
  return torch::linalg_solve(A + std::sqrt(damping) * pi * I_A, left, /*left=*/false);
}

// K-FAC of make_mlp(), written down as the formulas are.
class Reference {
 public:
  Reference(nn::Sequential model, KFACOptions options) : model_(model), o_(std::move(options)) {}

  void step(const Batch& batch) {
    Tensors inputs;
    Tensors outputs;
    torch::Tensor x = batch.inputs;
    for (size_t layer = 0; layer < 3; ++layer) {
      inputs.push_back(with_ones(x.detach()));
      outputs.push_back(linear(layer)(x));
      x = layer < 2 ? outputs.back().tanh() : outputs.back();
    }
    const auto n = static_cast<double>(batch.targets.size(0));
    const auto loss = cross_entropy(x, batch.targets);
    const auto output_gradients = torch::autograd::grad({loss}, outputs, {}, true);
    const auto gradients = torch::autograd::grad({loss}, model_->parameters());
    const torch::NoGradGuard no_grad;
    Tensors V;
    Tensors D;
    double sum = 0.0;
    for (size_t layer = 0; layer < 3; ++layer) {
      if (step_ % o_.TCov() == 0) {
        const double k = static_cast<double>(step_ / o_.TCov() + 1);
        const double d = std::min(1.0 - 1.0 / k, o_.stat_decay());
        const auto g = n * output_gradients[layer];
        const auto A = inputs[layer].t().mm(inputs[layer]) / n;
        const auto G = g.t().mm(g) / n;
        A_[layer] = k == 1.0 ? A : d * A_[layer] + (1.0 - d) * A;
        G_[layer] = k == 1.0 ? G : d * G_[layer] + (1.0 - d) * G;
      }
      if (step_ % o_.TInv() == 0) {
        A_used_[layer] = A_[layer].clone();
        G_used_[layer] = G_[layer].clone();
      }
      const auto params = torch::cat({linear(layer)->weight, linear(layer)->bias.unsqueeze(1)}, 1);
      V.push_back(torch::cat({gradients[2 * layer], gradients[2 * layer + 1].unsqueeze(1)}, 1) +
                  o_.weight_decay() * params);
      D.push_back(reference_direction(A_used_[layer], G_used_[layer], V.back(), o_.damping(),
                                      o_.damping_split()));
      sum += (V.back() * D.back()).sum().item<double>() * o_.lr() * o_.lr();
    }
    const double nu = o_.kl_clip() ? std::min(1.0, std::sqrt(*o_.kl_clip() / std::abs(sum))) : 1.0;
    for (size_t layer = 0; layer < 3; ++layer) {
      auto& buffer = buffers_[layer];
      buffer = buffer.defined() ? o_.momentum() * buffer + nu * D[layer] : nu * D[layer];
      const auto columns = buffer.size(1) - 1;
      linear(layer)->weight.sub_(o_.lr() * buffer.narrow(1, 0, columns));
      linear(layer)->bias.sub_(o_.lr() * buffer.select(1, columns));
    }
    ++step_;
  }

 private:
  nn::Linear linear(size_t layer) { return nn::Linear(model_->ptr<nn::LinearImpl>(2 * layer)); }

  nn::Sequential model_;
  KFACOptions o_;
  int64_t step_ = 0;
  std::map<size_t, torch::Tensor> A_, G_, A_used_, G_used_, buffers_;
};

class Splits : public ::testing::TestWithParam<std::string> {};

TEST_P(Splits, FollowTheFormulas) {
  for (const auto& kl_clip : {std::optional<double>(), std::optional<double>(1e-3)}) {
    const auto options = KFACOptions(0.05)
                             .TCov(2)
                             .TInv(3)
                             .damping(0.01)
                             .weight_decay(0.01)
                             .stat_decay(0.6)
                             .eps(0.0)
                             .kl_clip(kl_clip)
                             .damping_split(GetParam());
    auto model = make_mlp();
    auto reference_model = make_mlp();
    KFAC optimizer(*model, options);
    Reference reference(reference_model, options);
    for (int step = 0; step < 10; ++step) {
      const auto batch = make_batch(step, kMlpSample);
      train_on(optimizer, model, batch);
      reference.step(batch);
    }
    expect_near_each(model->parameters(), reference_model->parameters(), 1e-9);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Splits, ::testing::Values("pi", "plain", "exact"));

// For one sample without weight sharing the factors are exact.
TEST(Kfac, EqualsTheDenseFisherOfOneSample) {
  for (const double damping : {1e-6, 1e-3, 1.0}) {
    auto model = make_mlp();
    const auto before = copies(model->parameters());
    KFAC optimizer(
        *model,
        KFACOptions(1.0).damping(damping).damping_split("exact").momentum(0).kl_clip(std::nullopt));
    train_on(optimizer, model, make_batch(0, kMlpSample, 1));
    const auto params = model->parameters();
    for (size_t i = 0; i < params.size(); i += 2) {
      const auto g = torch::cat({params[i].grad().reshape({-1}), params[i + 1].grad()});
      const auto F = g.outer(g) + damping * torch::eye(g.numel(), g.options());
      const auto expected = torch::linalg_solve(F, g);
      const auto weight_step = (before[i] - params[i].detach()).reshape({-1});
      const auto actual = torch::cat({weight_step, before[i + 1] - params[i + 1].detach()});
      EXPECT_LT((actual - expected).norm().item<double>(), 1e-6 * expected.norm().item<double>());
    }
  }
}

TEST(Kfac, SeesAConvolutionOverItsWholeInputAsALinearLayer) {
  torch::manual_seed(3);
  nn::Sequential convolution(nn::Conv2d(2, 3, 4), nn::Flatten());
  nn::Sequential linear(nn::Flatten(), nn::Linear(32, 3));
  convolution->to(torch::kDouble);
  linear->to(torch::kDouble);
  const auto equalise = [](const nn::Module& from, const nn::Module& to) {
    const torch::NoGradGuard no_grad;
    to.parameters()[0].copy_(from.parameters()[0].view_as(to.parameters()[0]));
    to.parameters()[1].copy_(from.parameters()[1]);
  };
  equalise(*convolution, *linear);
  const auto options = KFACOptions(0.1).TCov(1).TInv(2);
  KFAC first(*convolution, options);
  KFAC second(*linear, options);
  train(first, convolution, {2, 4, 4}, 0, 5);
  train(second, linear, {2, 4, 4}, 0, 5);
  expect_near(convolution->parameters()[0].view({3, 32}), linear->parameters()[0], 1e-10);
  expect_near(convolution->parameters()[1], linear->parameters()[1], 1e-10);
}

// ---- what is captured

// Trains a model in a way that must not differ from one batch a step.
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

// Gradients that are dropped take their captures along, however that is done.
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

// ---- other parameters

struct Mixed : public nn::Module {
  Mixed() {
    torch::manual_seed(6);
    embedding = register_module("embedding", nn::Embedding(7, 4));
    lstm = register_module("lstm", nn::LSTM(4, 4));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({4})));
    head = register_module("head", nn::Linear(4, 3));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& indices) {
    const auto x = std::get<0>(lstm(embedding(indices).transpose(0, 1)));
    return head(norm(x[-1]));
  }
  nn::Embedding embedding{nullptr};
  nn::LSTM lstm{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};
};

TEST(Kfac, FallsBackToMomentum) {
  const auto model = std::make_shared<Mixed>();
  const auto twin = std::make_shared<Mixed>();
  KFAC optimizer(*model, KFACOptions(0.1).weight_decay(0.01).kl_clip(std::nullopt));
  torch::optim::SGD sgd(twin->parameters(),
                        torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  Warnings warnings;
  for (int step = 0; step < 3; ++step) {
    const auto indices = torch::tensor({{1, 2, 3}, {4, 5, 6}}).add(step).remainder(7);
    const auto targets = torch::tensor({0, 2});
    optimizer.zero_grad();
    cross_entropy(model->forward(indices), targets).backward();
    {  // the gradients of the other parameters depend on the head
      const torch::NoGradGuard no_grad;
      const auto params = model->parameters();
      auto twins = twin->parameters();
      for (size_t i = 0; i < params.size(); ++i) {
        twins[i].mutable_grad() = params[i].grad().clone();
      }
    }
    optimizer.step();
    sgd.step();
  }
  const auto names = model->named_parameters();
  const auto report = optimizer.report();
  EXPECT_EQ(report.preconditioned, (std::vector<std::string>{"head.weight", "head.bias"}));
  EXPECT_EQ(report.fallback.size(), names.size() - 2);
  for (const auto& name : report.fallback) {
    expect_near(names[name], twin->named_parameters()[name], 1e-12);
  }
  EXPECT_FALSE(torch::allclose(names["head.weight"], twin->head->weight));
  expect_contains(warnings.text, c10::str("KFAC preconditions 2 of ", names.size(), " parameters"));
  expect_contains(warnings.text, "4 (LSTM is of an unsupported type: lstm.weight_ih_l0, ");
  expect_contains(warnings.text, "1 (looked up as an embedding: embedding.weight)");
  EXPECT_EQ(warnings.text.find("head"), std::string::npos);
  EXPECT_EQ(warnings.text.find("SGD"), warnings.text.rfind("SGD"));  // once
}

// A head with the weight of an embedding, by its matrix or by the transpose of that.
struct TiedHead : public nn::Module {
  TiedHead() {
    torch::manual_seed(7);
    embedding = register_module("embedding", nn::Embedding(nn::EmbeddingOptions(5, 3)));
    mix = register_module("mix", nn::Linear(3, 3));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& words) {
    return torch::linear(mix(embedding(words)).tanh(), embedding->weight);
  }
  nn::Embedding embedding{nullptr};
  nn::Linear mix{nullptr};
};

TEST(Kfac, PreconditionsAHeadThatIsTiedToAnEmbedding) {
  TiedHead model;
  const auto words = torch::tensor({1, 2, 1, 4});
  const auto targets = torch::tensor({0, 1, 4, 4});
  const double n = 4.0;
  const double damping = 0.05;
  KFAC optimizer(model, KFACOptions(1.0).momentum(0.0).kl_clip(std::nullopt).damping(damping));
  const auto h = model.embedding(words);
  const auto x = model.mix(h).tanh();
  const auto z = torch::linear(x, model.embedding->weight);
  const auto gradients = torch::autograd::grad({cross_entropy(z, targets)}, {z, h}, {}, true);
  cross_entropy(model.forward(words), targets).backward();
  const auto before = model.embedding->weight.detach().clone();
  Warnings warnings;
  optimizer.step();
  EXPECT_EQ(warnings.text, "");
  EXPECT_EQ(optimizer.report().preconditioned.size(), 3);

  const torch::NoGradGuard no_grad;
  const auto A1 = x.t().mm(x) / n;
  const auto G1 = gradients[0].t().mm(gradients[0]) * n;
  const auto A2 = gradients[1].t().mm(gradients[1]) * n;
  const auto G2 = torch::diag(torch::tensor({0.0, 0.5, 0.25, 0.0, 0.25}, torch::kDouble));
  const auto s1 = (G1.trace() / A1.trace()).sqrt();  // balances the pairs
  const auto s2 = (G2.trace() / A2.trace()).sqrt();
  auto A = s1 * A1 + s2 * A2;
  auto G = G1 / s1 + G2 / s2;
  A = A * (A1.trace() / A.trace());
  G = G * ((A1.trace() * G1.trace() + A2.trace() * G2.trace()) / (A.trace() * G.trace()));
  const auto& state = kfac_state(optimizer, model.embedding->weight);
  expect_near(state.A()[0], A, 1e-12);
  expect_near(state.G()[0], G.diag(), 1e-12);
  EXPECT_EQ(optimizer.report().diagonal_G, std::vector<std::string>{"embedding.weight"});
  G = torch::diag(G.diag());
  const auto direction = reference_direction(A, G, model.embedding->weight.grad(), damping, "pi");
  expect_near(before - model.embedding->weight.detach(), direction, 1e-10);
}

TEST(Kfac, FallsBackForAnEmbeddingThatIsAlsoAWeightInOut) {
  TiedHead model;
  KFAC optimizer(model, KFACOptions(0.1).TCov(1));
  Warnings warnings;
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    const auto soft = torch::randn({3, 5}, torch::kDouble);
    model.mix(model.embedding(torch::tensor({1, 2, 3})) + soft.mm(model.embedding->weight))
        .square()
        .mean()
        .backward();
    optimizer.step();
  }
  expect_contains(warnings.text, "1 (used as [in, out] and as [out, in]: embedding.weight)");
  EXPECT_EQ(optimizer.report().fallback, std::vector<std::string>{"embedding.weight"});
}

// Its lookups are not captured any more when the head appears.
TEST(Kfac, PreconditionsAHeadThatIsTiedLater) {
  TiedHead model;
  KFAC optimizer(model, KFACOptions(0.1).TCov(1));
  const auto words = torch::tensor({1, 2, 1, 4});
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    const auto loss = step < 2 ? model.mix(model.embedding(words)).square().mean()
                               : cross_entropy(model.forward(words), torch::tensor({0, 1, 4, 4}));
    loss.backward();
    optimizer.step();
    EXPECT_EQ(optimizer.report().fallback.size(), step < 2 ? 1 : 0);
  }
  EXPECT_EQ(kfac_state(optimizer, model.embedding->weight).factor_updates().item<float>(), 3.0F);
}

// Their layers receive time or position as the first dimension.
TEST(Kfac, FallsBackWithinTransformerLayers) {
  nn::TransformerEncoderLayer layer(nn::TransformerEncoderLayerOptions(4, 2).dropout(0.0));
  nn::Linear head(4, 3);
  nn::Module model;
  model.register_module("layer", layer);
  model.register_module("head", head);
  KFAC optimizer(model, KFACOptions(0.1));
  Warnings warnings;
  const auto x = layer(torch::randn({5, 6, 4}));
  cross_entropy(head(x.mean(0)), torch::randint(3, {6}, torch::kLong)).backward();
  optimizer.step();
  EXPECT_EQ(optimizer.report().preconditioned,
            (std::vector<std::string>{"head.weight", "head.bias"}));
  expect_contains(warnings.text,
                  "(Linear takes samples in another dimension than the first: "
                  "layer.self_attn.out_proj.weight, ");
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

TEST(Kfac, LeavesFrozenAndUnusedParametersAlone) {
  nn::Linear used(5, 4);
  nn::Linear frozen(4, 4);
  nn::Linear unused(4, 4);
  nn::Sequential model(used, nn::Tanh(), frozen, unused);
  frozen->weight.set_requires_grad(false);
  KFAC optimizer(*model, KFACOptions(0.1));
  const auto before = copies(model->parameters());
  const auto x = torch::randn({6, 5});
  Warnings warnings;
  cross_entropy(frozen(used(x).tanh()), torch::randint(4, {6}, torch::kLong)).backward();
  optimizer.step();
  const auto params = model->parameters();
  EXPECT_FALSE(torch::equal(params[0], before[0]));
  EXPECT_FALSE(torch::equal(params[3], before[3]));  // the bias of the frozen weight, by SGD
  for (const int i : {2, 4, 5}) {
    EXPECT_TRUE(torch::equal(params[i], before[i])) << i;
    EXPECT_TRUE(state_tensors(optimizer, params[i]).empty());
  }
  expect_contains(warnings.text, "2.bias");
}

// ---- schedules, groups, dtypes

TEST(Kfac, UpdatesFactorsAndInversesWhenDue) {
  auto model = make_mlp();
  KFAC optimizer(*model, KFACOptions(0.05).TCov(2).TInv(3));
  const auto weight = model->parameters()[0];
  torch::Tensor A;
  torch::Tensor A_inverse;
  for (int step = 0; step < 9; ++step) {
    train(optimizer, model, kMlpSample, step, step + 1);
    const auto& state = kfac_state(optimizer, weight);
    if (step > 0) {
      EXPECT_EQ(!torch::equal(state.A(), A), step % 2 == 0) << step;
      EXPECT_EQ(!torch::equal(state.A_inverse(), A_inverse), step % 3 == 0) << step;
    }
    EXPECT_EQ(state.factor_updates().item<int>(), step / 2 + 1);
    A = state.A().clone();
    A_inverse = state.A_inverse().clone();
  }
}

TEST(Kfac, GivesEveryGroupItsOptions) {
  const auto groups_of = [](const nn::Sequential& model, double second_lr) {
    const auto params = model->parameters();
    return std::vector<OptimizerParamGroup>{
        OptimizerParamGroup({params[0], params[1]}),
        OptimizerParamGroup({params[2], params[3], params[4], params[5]},
                            std::make_unique<KFACOptions>(KFACOptions(second_lr)))};
  };
  auto model = make_mlp();
  const auto before = copies(model->parameters());
  KFAC optimizer(*model, groups_of(model, 0.0), KFACOptions(0.05));
  train(optimizer, model, kMlpSample, 0, 3);
  EXPECT_FALSE(torch::equal(model->parameters()[0], before[0]));
  EXPECT_TRUE(torch::equal(model->parameters()[2], before[2]));

  auto split_model = make_mlp();
  auto whole_model = make_mlp();
  KFAC split(*split_model, groups_of(split_model, 0.05), KFACOptions(0.05));
  KFAC whole(*whole_model, KFACOptions(0.05));
  train(split, split_model, kMlpSample, 0, 5);
  train(whole, whole_model, kMlpSample, 0, 5);
  expect_equal(copies(split_model->parameters()), copies(whole_model->parameters()));
}

TEST(Kfac, TakesGroupsLater) {
  auto model = make_mlp();
  const auto params = model->parameters();
  KFAC optimizer(*model, {OptimizerParamGroup({params[0], params[1]})}, KFACOptions(0.05).TCov(3));
  train(optimizer, model, kMlpSample, 0, 2);
  optimizer.add_param_group(OptimizerParamGroup({params[2], params[3]}));
  train(optimizer, model, kMlpSample, 2, 4);
  EXPECT_EQ(optimizer.report().preconditioned,
            (std::vector<std::string>{"0.weight", "0.bias", "2.weight", "2.bias"}));
  EXPECT_EQ(kfac_state(optimizer, params[2]).step().item<int>(), 2);
}

TEST(Kfac, KeepsStateInFloat32OfLowPrecisionParameters) {
  auto model = make_mlp(torch::kBFloat16);
  KFAC optimizer(*model, KFACOptions(0.05).TCov(1).TInv(1));
  train(optimizer, model, kMlpSample, 0, 3);
  for (const auto& [key, tensor] : state_tensors(optimizer, model->parameters()[0])) {
    EXPECT_EQ(tensor.scalar_type(), float32_state_dtype(key)) << key;
    EXPECT_TRUE(tensor.isfinite().all().item<bool>()) << key;
  }
}

TEST(Kfac, LearnsFasterThanMomentum) {
  auto model = make_mlp();
  KFAC kfac(*model, KFACOptions(0.1).TCov(1).TInv(5).kl_clip(0.1));
  expect_faster_than_momentum(kfac, model, 0.7);
}

// ---- failures

TEST(Kfac, SkipsStepsThatAreNotFinite) {
  auto model = make_mlp();
  KFAC optimizer(*model, KFACOptions(0.05).TCov(1).TInv(1));
  const auto poisoned = [&] {
    auto batch = make_batch(7, kMlpSample);
    batch.inputs[0][0] = kNaN;
    train_on(optimizer, model, batch);
  };
  poisoned();
  train(optimizer, model, kMlpSample, 0, 3);
  auto clean_model = make_mlp();
  KFAC clean(*clean_model, KFACOptions(0.05).TCov(1).TInv(1));
  train(clean, clean_model, kMlpSample, 0, 3);
  expect_equal(copies(model->parameters()), copies(clean_model->parameters()));
  expect_equal(all_state(optimizer), all_state(clean));
  poisoned();
  poisoned();
  expect_contains(message_of<c10::Error>(poisoned), "3 steps in a row");
  expect_equal(copies(model->parameters()), copies(clean_model->parameters()));
}

TEST(Kfac, RefusesWrongOptions) {
  const nn::Linear model(2, 2);
  const auto refuses = [&](const KFACOptions& options, const std::string& part) {
    expect_contains(message_of<c10::ValueError>([&] { KFAC optimizer(*model, options); }), part);
  };
  refuses(KFACOptions(-1.0), "lr must be a finite number in [0, 3.40282e+38], got -1");
  refuses(KFACOptions(1e39), "lr must be a finite number in [0, 3.40282e+38], got 1e+39");
  refuses(KFACOptions().momentum(1.0), "momentum must be in [0, 1), got 1");
  refuses(KFACOptions().weight_decay(-0.1), "weight_decay");
  refuses(KFACOptions().damping(-1e-3), "damping");
  refuses(KFACOptions().damping(kNaN), "damping");
  refuses(KFACOptions().TCov(0), "TCov must be at least 1, got 0");
  refuses(KFACOptions().TInv(-1), "TInv must be at least 1, got -1");
  refuses(KFACOptions().eps(kInfinity), "eps");
  refuses(KFACOptions().stat_decay(1.5), "stat_decay must be in [0, 1], got 1.5");
  refuses(KFACOptions().kl_clip(0.0), "kl_clip must be a finite number above 0, or none, got 0");
  refuses(KFACOptions().damping_split("half"),
          "damping_split must be one of 'pi', 'plain', 'exact'");
}

TEST(Kfac, RefusesGroupsThatDoNotFitTogether) {
  auto model = make_mlp();
  const auto params = model->parameters();
  const auto group = [](torch::Tensor param, const KFACOptions& options) {
    return OptimizerParamGroup({std::move(param)}, std::make_unique<KFACOptions>(options));
  };
  KFAC optimizer(*model, {group(params[0], KFACOptions())});
  for (const auto& [options, name] : std::vector<std::pair<KFACOptions, std::string>>{
           {KFACOptions().kl_clip(std::nullopt), "kl_clip"},
           {KFACOptions().batch_averaged(false), "batch_averaged"},
           {KFACOptions().damping_split("exact"), "damping_split"}}) {
    const auto add = [&, &options = options] {
      optimizer.add_param_group(group(params[2], options));
    };
    expect_contains(message_of<c10::ValueError>(add),
                    name + " must be the same in all parameter groups");
    EXPECT_EQ(optimizer.param_groups().size(), 1U);
  }
  optimizer.add_param_group(group(params[2], KFACOptions(0.5).damping(1.0).TCov(3)));
  static_cast<KFACOptions&>(optimizer.param_groups()[1].options()).kl_clip(1.0);
  cross_entropy(model->forward(make_batch(0, kMlpSample).inputs), torch::zeros({6}, torch::kLong))
      .backward();
  const auto before = copies(params);
  expect_contains(message_of<c10::ValueError>([&] { optimizer.step(); }), "kl_clip");
  expect_equal(copies(params), before);
}

// ---- checkpoints

KFAC make_kfac(const nn::Sequential& model, const std::string& split) {
  return KFAC(*model, KFACOptions(0.05).TCov(2).TInv(3).damping_split(split));
}

TEST_P(Splits, ContinueFromAnArchive) {
  for (const auto& [make, sample] :
       {std::make_pair(&make_mlp, kMlpSample), std::make_pair(&make_convnet, kImageSample)}) {
    for (int pause = 1; pause < 7; ++pause) {
      auto model = make(torch::kFloat);
      auto optimizer = make_kfac(model, GetParam());
      const Warnings warnings;
      train(optimizer, model, sample, 0, pause);
      const auto data = saved(optimizer);
      auto resumed_model = make(torch::kFloat);
      copy_parameters(*model, *resumed_model);
      train(optimizer, model, sample, pause, 8);

      auto resumed = make_kfac(resumed_model, GetParam());
      load(resumed, data);
      train(resumed, resumed_model, sample, pause, 8);
      expect_equal(copies(resumed_model->parameters()), copies(model->parameters()));
      expect_equal(all_state(resumed), all_state(optimizer));
    }
  }
}

TEST(KfacArchives, AreSnapshotsAndGoBack) {
  auto model = make_mlp();
  auto optimizer = make_kfac(model, "pi");
  train(optimizer, model, kMlpSample, 0, 3);
  const auto values = copies(model->parameters());
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  train(optimizer, model, kMlpSample, 3, 6);
  const auto expected = copies(model->parameters());
  std::stringstream stream;
  archive.save_to(stream);
  torch::serialize::InputArchive input;
  input.load_from(stream);
  for (int round = 0; round < 2; ++round) {
    optimizer.load(input);
    for (size_t i = 0; i < values.size(); ++i) {
      model->parameters()[i].detach().copy_(values[i]);
    }
    train(optimizer, model, kMlpSample, 3, 6);
    expect_equal(copies(model->parameters()), expected);
  }
}

TEST(KfacArchives, ThatDoNotFitLoadNothing) {
  auto model = make_mlp();
  auto optimizer = make_kfac(model, "pi");
  train(optimizer, model, kMlpSample, 0, 2);
  const auto data = saved(optimizer);
  const auto refused = [&](nn::Sequential other_model) {
    auto other = make_kfac(other_model, "pi");
    auto batch = make_batch(0, kMlpSample);
    train_on(other, other_model, batch);
    return refusal_to_load(other, data);
  };
  torch::manual_seed(0);
  nn::Sequential fewer(nn::Linear(5, 7), nn::Linear(7, 3));
  nn::Sequential wider(nn::Linear(5, 7), nn::Tanh(), nn::Linear(7, 5), nn::Linear(5, 3));
  nn::Sequential biasless(nn::Linear(5, 7), nn::Tanh(), nn::Linear(7, 4),
                          nn::Linear(nn::LinearOptions(4, 3).bias(false)));
  for (nn::Sequential other : {fewer, wider, biasless}) {
    other->to(torch::kDouble);
  }
  expect_contains(refused(fewer), "has 6 parameters, but that of the optimizer has 4");
  expect_contains(refused(biasless), "has 6 parameters, but that of the optimizer has 5");
  expect_contains(refused(wider), "momentum_buffer of '2.weight', parameter 2 of group 0");
  auto exact = make_kfac(model, "exact");
  train(exact, model, kMlpSample, 0, 1);
  expect_foreign_archive_refused(exact);
}

TEST(KfacArchives, RestoreOptions) {
  expect_restored_options<KFAC>(KFACOptions(0.5)
                                    .momentum(0.8)
                                    .weight_decay(0.1)
                                    .damping(0.2)
                                    .TCov(3)
                                    .TInv(7)
                                    .batch_averaged(false)
                                    .eps(1e-6)
                                    .stat_decay(0.9)
                                    .kl_clip(std::nullopt)
                                    .damping_split("plain")
                                    .maximize(true));
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

TEST(Kfac, KeepsDiagonalsOfLargeFactors) {
  nn::Sequential model(nn::Linear(600000, 2), nn::Linear(2, 3));
  KFAC optimizer(*model, KFACOptions(0.01));
  Warnings warnings;
  cross_entropy(model->forward(torch::randn({4, 600000})), torch::tensor({0, 1, 2, 0})).backward();
  optimizer.step();
  const auto& state = kfac_state(optimizer, model->parameters()[0]);
  EXPECT_EQ(state.A().sizes(), (std::vector<int64_t>{1, 600001}));
  EXPECT_EQ(state.A_inverse().sizes(), (std::vector<int64_t>{1, 600001}));
  EXPECT_EQ(state.G().sizes(), (std::vector<int64_t>{1, 2, 2}));
  EXPECT_EQ(optimizer.report().diagonal_A, std::vector<std::string>{"0.weight"});
  expect_contains(warnings.text, "max_factor_size: 1 (a factor A: 0.weight (600001))");
}

TEST(Kfac, MayBeMovedAndOutlivedByTheModel) {
  auto model = make_mlp();
  auto moved_model = make_mlp();
  auto optimizer = make_kfac(model, "pi");
  {
    auto temporary = make_kfac(moved_model, "pi");
    const auto batch = make_batch(0, kMlpSample);
    cross_entropy(moved_model->forward(batch.inputs), batch.targets).backward();
    KFAC moved(std::move(temporary));
    moved.step();
    train(optimizer, model, kMlpSample, 0, 1);
    train(moved, moved_model, kMlpSample, 1, 4);
    train(optimizer, model, kMlpSample, 1, 4);
  }
  expect_equal(copies(moved_model->parameters()), copies(model->parameters()));
  cross_entropy(moved_model->forward(make_batch(0, kMlpSample).inputs),
                torch::zeros({6}, torch::kLong))
      .backward();
}

TEST(Kfac, FollowsTheCpuOnCuda) {
  if (!torch::cuda::is_available()) {
    GTEST_SKIP() << "skipped: no CUDA device";
  }
  for (const auto* split : {"pi", "plain", "exact"}) {
    auto model = make_convnet();
    auto cuda_model = make_convnet();
    cuda_model->to(torch::kCUDA);
    auto optimizer = make_kfac(model, split);
    auto cuda_optimizer = make_kfac(cuda_model, split);
    for (int step = 0; step < 8; ++step) {
      const auto batch = make_batch(step, kImageSample);
      train_on(optimizer, model, batch);
      train_on(cuda_optimizer, cuda_model,
               {batch.inputs.to(torch::kCUDA), batch.targets.to(torch::kCUDA)});
    }
    cuda_optimizer.check_errors();
    const auto params = model->parameters();
    for (size_t i = 0; i < params.size(); ++i) {
      expect_near(cuda_model->parameters()[i].cpu(), params[i], 1e-6);
    }
  }
}

}  // namespace
}  // namespace torchium::testing
