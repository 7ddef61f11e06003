// Parameters that K-FAC cannot precondition, and embeddings that are also heads.
#include "kfac_testing.h"

#include <algorithm>
#include <map>
#include <string>

namespace torchium::testing {
namespace {

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
  EXPECT_EQ(report.preconditioned,
            (std::vector<std::string>{"embedding.weight", "norm.weight", "norm.bias", "head.weight",
                                      "head.bias"}));
  EXPECT_EQ(report.fallback.size(), names.size() - 5);
  EXPECT_EQ(report.parameters.size(), names.size());
  std::ostringstream table;
  table << report;
  expect_contains(table.str(), "\nnorm.weight ");
  expect_contains(table.str(), "\ngraphs ");
  const auto treatment = [&](const std::string& name) {
    const auto found = std::find_if(report.parameters.begin(), report.parameters.end(),
                                    [&](const auto& parameter) { return parameter.name == name; });
    return found->treatment + ": " + found->detail;
  };
  EXPECT_EQ(treatment("embedding.weight"), "diagonal: A 4, the diagonal of G 7");
  EXPECT_EQ(treatment("head.weight").substr(0, 11), "factors: A ");
  EXPECT_EQ(treatment("head.bias"), treatment("head.weight") + " of head.weight");
  EXPECT_EQ(treatment("norm.weight"), "unit-wise: 4 blocks 2 x 2");
  EXPECT_EQ(treatment("norm.bias"), "unit-wise: 4 blocks 2 x 2 of norm.weight");
  for (const auto& name : report.fallback) {
    expect_near(names[name], twin->named_parameters()[name], 1e-12);
  }
  EXPECT_FALSE(torch::allclose(names["head.weight"], twin->head->weight));
  expect_contains(warnings.text, c10::str("KFAC preconditions 5 of ", names.size(), " parameters"));
  expect_contains(
      warnings.text,
      "4 (LSTM has no Kronecker factors (its weights are not linear layers of modules): "
      "lstm.weight_ih_l0, ");
  EXPECT_EQ(warnings.text.find("head"), std::string::npos);
  EXPECT_EQ(warnings.text.find("embedding"), std::string::npos);
  EXPECT_EQ(warnings.text.find("SGD"), warnings.text.rfind("SGD"));  // once
}

// A head with an embedding's weight, by its matrix or by the transpose.
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

// A = E[h h^T] with the gradients h of what was looked up, and G the frequencies of the words.
TEST(Kfac, PreconditionsAnEmbeddingByTheFrequenciesOfItsWords) {
  nn::Sequential model(nn::Embedding(nn::EmbeddingOptions(6, 3).padding_idx(0)), nn::Linear(3, 2));
  model->to(torch::kDouble);
  const auto words = torch::tensor({{1, 2, 0}, {1, 4, 1}});
  const double damping = 0.05;
  KFAC optimizer(*model, KFACOptions(1.0).momentum(0.0).kl_clip(std::nullopt).damping(damping));
  const auto table = model->parameters()[0];
  const auto loss = [&](const torch::Tensor& h) {
    return cross_entropy(torch::tanh(model[1]->as<nn::Linear>()->forward(h)).sum(1),
                         torch::tensor({0, 1}));
  };
  const auto h = torch::embedding(table.detach(), words).requires_grad_();
  const auto gradient = torch::autograd::grad({loss(h)}, {h})[0].flatten(0, 1);
  const auto counted = gradient * words.flatten().ne(0).unsqueeze(1);
  loss(model[0]->as<nn::Embedding>()->forward(words)).backward();
  const auto before = table.detach().clone();
  optimizer.step();
  const torch::NoGradGuard no_grad;
  const auto A = counted.t().mm(counted) * 2.0;
  const auto G = torch::tensor({0.0, 0.6, 0.2, 0.0, 0.2, 0.0}, torch::kDouble);
  const auto& state = kfac_state(optimizer, table);
  expect_near(state.A()[0], A, 1e-12);
  expect_near(state.G()[0], G, 1e-12);
  expect_near(before - table.detach(),
              reference_direction(A, torch::diag(G), table.grad(), damping, "pi"), 1e-10);
}

TEST(Kfac, FallsBackForRowsThatSamplesShare) {
  nn::Sequential model(nn::Embedding(3, 4), nn::Linear(4, 2));
  KFAC optimizer(*model, KFACOptions(0.1));
  const auto positions = model[0]->as<nn::Embedding>()->forward(torch::arange(3));
  const auto x = positions + torch::randn({5, 3, 4});
  Warnings warnings;
  model[1]->as<nn::Linear>()->forward(x).square().mean().backward();
  optimizer.step();
  expect_contains(warnings.text, "1 (looked up for positions that samples share: 0.weight)");
}

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
    EXPECT_EQ(optimizer.report().fallback.size(), 0);
  }
  EXPECT_EQ(kfac_state(optimizer, model.embedding->weight).factor_updates().item<float>(), 5.0F);
}

// Their layers have time as the first dimension.
TEST(Kfac, FallsBackWithinRecurrentLayers) {
  nn::LSTM layer(nn::LSTMOptions(4, 4));
  nn::Linear head(4, 3);
  nn::Module model;
  model.register_module("layer", layer);
  model.register_module("head", head);
  KFAC optimizer(model, KFACOptions(0.1));
  Warnings warnings;
  const auto x = std::get<0>(layer(torch::randn({5, 6, 4})));
  cross_entropy(head(x.mean(0)), torch::randint(3, {6}, torch::kLong)).backward();
  optimizer.step();
  EXPECT_EQ(optimizer.report().preconditioned,
            (std::vector<std::string>{"head.weight", "head.bias"}));
  expect_contains(warnings.text,
                  "(LSTM has no Kronecker factors (its weights are not linear layers of modules): "
                  "layer.weight_ih_l0, ");
}

// Treatment and detail of each parameter.
std::map<std::string, std::string> treatments_of(const KFAC& optimizer) {
  std::map<std::string, std::string> result;
  for (const auto& [name, treatment, detail] : optimizer.report().parameters) {
    result[name] = treatment + ": " + detail;
  }
  return result;
}

TEST(Kfac, FallsBackForTheBiasOfATransposedConvolution) {
  nn::Sequential model(nn::ConvTranspose2d(nn::ConvTranspose2dOptions(4, 6, 3).groups(2).stride(2)),
                       nn::Tanh(), nn::Flatten(), nn::Linear(6 * 5 * 5, 3));
  KFAC optimizer(*model, KFACOptions(0.1));
  const Warnings warnings;
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    cross_entropy(model->forward(torch::randn({6, 4, 2, 2})), torch::randint(3, {6}, torch::kLong))
        .backward();
    optimizer.step();
  }
  const auto treatments = treatments_of(optimizer);
  EXPECT_EQ(treatments.at("0.weight"), "factors: 2 groups with A 27, G 2");
  EXPECT_EQ(treatments.at("0.bias"),
            "fallback: the bias of a transposed convolution, whose factors have no row for it");
}

TEST(Kfac, SaysThatTheWeightBesideABiasIsFrozen) {
  for (const int frozen_before : {0, 1}) {  // the first step, or the second
    nn::Sequential model(nn::Linear(5, 4), nn::LayerNorm(nn::LayerNormOptions({4})),
                         nn::Linear(4, 3));
    const auto params = model->named_parameters();
    KFAC optimizer(*model, KFACOptions(0.1));
    const Warnings warnings;
    for (int step = 0; step < 2; ++step) {
      if (step == frozen_before) {
        params["0.weight"].requires_grad_(false);
        params["1.weight"].requires_grad_(false);
      }
      optimizer.zero_grad();
      cross_entropy(model->forward(torch::randn({6, 5})), torch::randint(3, {6}, torch::kLong))
          .backward();
      optimizer.step();
    }
    const auto treatments = treatments_of(optimizer);
    EXPECT_EQ(treatments.at("0.bias"), "fallback: its weight is not trained");
    EXPECT_EQ(treatments.at("1.bias"), "fallback: its weight is not trained");
    EXPECT_EQ(treatments.at("2.bias"), "factors: A 5, G 3 of 2.weight");
  }
}

TEST(Kfac, LeavesSkippedLayersToMomentum) {
  nn::Sequential model(nn::Linear(5, 4), nn::Tanh(), nn::Linear(4, 4),
                       nn::LayerNorm(nn::LayerNormOptions({4})));
  KFAC optimizer(*model, KFACOptions(0.1).momentum(0.0).skip_layers({"^2$", "Norm"}));
  const Warnings warnings;
  const auto before = copies(model->parameters());
  cross_entropy(model->forward(torch::randn({6, 5})), torch::randint(4, {6}, torch::kLong))
      .backward();
  optimizer.step();
  const auto treatments = treatments_of(optimizer);
  EXPECT_EQ(treatments.at("0.weight"), "factors: A 6, G 4");
  for (const char* name : {"2.weight", "2.bias", "3.weight", "3.bias"}) {
    EXPECT_EQ(treatments.at(name), "fallback: in skip_layers");
  }
  expect_near(model->parameters()[2].detach(), before[2] - 0.1 * model->parameters()[2].grad(),
              1e-6);
  expect_contains(
      message_of<c10::ValueError>([&] { KFAC(*model, KFACOptions(0.1).skip_layers({"("})); }),
      "not a regular expression");
}

TEST(Kfac, NamesEntriesOfSkipLayersThatMatchNoLayerOnce) {
  nn::Sequential model(nn::Linear(5, 4), nn::Tanh(), nn::Linear(4, 4));
  KFAC optimizer(*model, KFACOptions(0.1).skip_layers({"^2$", "haed", "Norm"}));
  const Warnings warnings;
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    model->forward(torch::randn({6, 5})).square().mean().backward();
    optimizer.step();
  }
  const std::string text =
      "KFAC skips no layer for 'haed', 'Norm' of skip_layers, which no name and no class of a "
      "layer "
      "matches; the layers are '0' (Linear), '2' (Linear)";
  expect_contains(warnings.text, text);
  EXPECT_EQ(warnings.text.find(text), warnings.text.rfind(text));
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

TEST(Kfac, TrainsLayersThatAreThawed) {
  nn::Linear frozen(5, 4);
  nn::Sequential model(frozen, nn::Tanh(), nn::Linear(4, 3));
  for (auto& param : frozen->parameters()) {
    param.set_requires_grad(false);
  }
  KFAC optimizer(*model, KFACOptions(0.1).TCov(1).TInv(1));
  const auto train = [&](int step) {
    const auto batch = make_batch(step, {5}, 6, torch::kFloat);
    optimizer.zero_grad();
    cross_entropy(model->forward(batch.inputs), batch.targets).backward();
    optimizer.step();
  };
  const auto before = copies(frozen->parameters());
  train(0);
  expect_equal(copies(frozen->parameters()), before);
  for (auto& param : frozen->parameters()) {
    param.set_requires_grad(true);
  }
  optimizer.zero_grad();
  train(1);
  EXPECT_FALSE(torch::equal(frozen->weight, before[0]));
  EXPECT_EQ(optimizer.report().preconditioned,
            (std::vector<std::string>{"0.weight", "0.bias", "2.weight", "2.bias"}));
}

}  // namespace
}  // namespace torchium::testing
