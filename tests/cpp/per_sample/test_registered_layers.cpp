// Layers whose classes have a formula: register_layer() and layer_call().
#include "kfac_testing.h"
#include "natural_gradient_testing.h"
#include "per_sample_testing.h"

#include <atomic>

namespace torchium::testing {
namespace {

using gradients::layer_call;
using gradients::PerSample;
using gradients::register_layer;
using gradients::SampleRows;

std::atomic<int> uses{0};  // of formulas

// Names of parameters are free. The product with a matrix would be an operator that is captured.
struct MixImpl : public nn::Module {
  MixImpl() {
    torch::manual_seed(5);
    mixing = register_parameter("mixing", torch::randn({4, 4}, torch::kDouble));
    shift = register_parameter("shift", torch::randn({1}, torch::kDouble));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return layer_call(*this, x, [&] { return torch::linear(x, mixing * mixing) + shift; });
  }
  torch::Tensor mixing, shift;
};
TORCH_MODULE(Mix);

SampleRows mix_rows(const MixImpl& layer, const at::Tensor& input,
                    const at::Tensor& output_gradient) {
  EXPECT_FALSE(at::GradMode::is_enabled());
  ++uses;
  const auto x = input.reshape({input.size(0), -1, 4});
  const auto g = output_gradient.reshape({input.size(0), -1, 4});
  return {{"shift", g.sum({1, 2}).unsqueeze(1)},
          {"mixing", 2.0 * layer.mixing * g.transpose(1, 2).bmm(x)}};
}

// Whose forward is that of the base class, and one with a forward of its own around that.
struct ChildImpl : public MixImpl {};
TORCH_MODULE(Child);
struct SquaredImpl : public MixImpl {
  torch::Tensor forward(const torch::Tensor& x) { return MixImpl::forward(x.square()); }
};
TORCH_MODULE(Squared);

class RegisteredLayers : public ::testing::Test {
 protected:
  void SetUp() override {
    register_layer<MixImpl>(mix_rows);
    uses = 0;
  }
};

torch::OrderedDict<std::string, torch::Tensor> reference_rows(nn::Sequential& model,
                                                              const Batch& batch) {
  torch::OrderedDict<std::string, torch::Tensor> rows;
  const auto params = model->named_parameters();
  std::vector<Tensors> parts(params.size());
  for (int64_t i = 0; i < batch.inputs.size(0); ++i) {
    const auto output = model->forward(batch.inputs.narrow(0, i, 1));
    const auto loss = cross_entropy(output, batch.targets.narrow(0, i, 1));
    const auto found = torch::autograd::grad({loss}, params.values());
    for (size_t p = 0; p < found.size(); ++p) {
      parts[p].push_back(found[p]);
    }
  }
  for (size_t p = 0; p < params.size(); ++p) {
    rows.insert(params[p].key(), torch::stack(parts[p]));
  }
  return rows;
}

void expect_all(nn::Sequential& model, const Batch& batch) {
  const auto expected = reference_rows(model, batch);
  const ForwardFunction forward = [&](const auto& x) { return model->forward(x); };
  const Warnings warnings;
  expect_quantities(*model, forward, cross_entropy, batch.inputs, batch.targets, expected);
  EXPECT_EQ(warnings.text, "");  // not one by one
  const int before = uses;
  EXPECT_GT(before, 0);
  PerSample scope(*model);
  cross_entropy(model->forward(batch.inputs), batch.targets).backward();
  for (const auto& [name, row] : expected.pairs()) {
    SCOPED_TRACE(name);
    expect_near(scope.grad_sample(name), row, 1e-10);
  }
  EXPECT_GT(uses, before);
}

TEST_F(RegisteredLayers, GiveTheRowsOfTheirFormula) {
  nn::Sequential model(nn::Linear(5, 4), Mix(), nn::Tanh(), nn::Linear(4, 3));
  model->to(torch::kDouble);
  expect_all(model, make_batch(0, {5}));
}

TEST_F(RegisteredLayers, MayUseAutogradInTheirFormula) {
  register_layer<MixImpl>([](const MixImpl& layer, const auto& input, const auto& g) {
    auto rows = mix_rows(layer, input, g);
    const torch::AutoGradMode enable_grad(true);
    const auto mixing = layer.mixing.detach().expand({input.size(0), 4, 4}).clone();
    mixing.set_requires_grad(true);
    const auto products = (mixing * mixing).bmm(input.unsqueeze(2)).squeeze(2);
    rows["mixing"] = torch::autograd::grad({(products * g).sum()}, {mixing})[0];
    return rows;
  });
  nn::Sequential model(nn::Linear(5, 4), Mix(), nn::Tanh(), nn::Linear(4, 3));
  model->to(torch::kDouble);
  expect_all(model, make_batch(0, {5}));
}

TEST_F(RegisteredLayers, MayBeUsedSeveralTimesOnSequences) {
  Mix mix;
  nn::Sequential model(mix, nn::Functional([mix](const torch::Tensor& x) mutable {
                         return mix->forward(x.tanh()).mean(1);
                       }));
  expect_all(model, make_batch(0, {3, 4}));
}

TEST_F(RegisteredLayers, IncludeClassesWithTheForwardOfTheirBase) {
  nn::Sequential model{Child(), nn::Tanh(), Squared()};
  expect_all(model, make_batch(0, {4}));
}

TEST_F(RegisteredLayers, MayHaveFrozenParameters) {
  for (const bool freezes_first : {false, true}) {
    Mix mix;
    nn::Sequential model(nn::Linear(5, 4), mix, nn::Linear(4, 3));
    model->to(torch::kDouble);
    const auto batch = make_batch(0, {5});
    const auto expected = reference_rows(model, batch);
    (freezes_first ? mix->mixing : mix->shift).set_requires_grad(false);
    const std::string name = freezes_first ? "1.shift" : "1.mixing";
    PerSample scope(*model, "sum");
    const auto output = model->forward(batch.inputs);
    (cross_entropy(output, batch.targets) * batch.inputs.size(0)).backward();
    EXPECT_EQ(scope.grad_samples().size(), 5U);
    expect_near(scope.grad_sample(name), expected[name], 1e-10);
  }
}

TEST_F(RegisteredLayers, LiveAsLongAsTheirRowsAreNeeded) {
  struct Holder : public nn::Module {
    Mix mix{register_module("mix", Mix())};
    void drop() {
      unregister_module("mix");
      mix = nullptr;
    }
  };
  Holder model;
  const auto batch = make_batch(0, {4});
  nn::Sequential same{model.mix};
  const auto expected = reference_rows(same, batch);
  same = nullptr;
  PerSample scope(model);
  cross_entropy(model.mix->forward(batch.inputs), batch.targets).backward();
  model.drop();
  expect_near(scope.grad_sample("mix.mixing"), expected["0.mixing"], 1e-10);
}

struct ThreeImpl : public MixImpl {
  ThreeImpl() { third = register_parameter("third", torch::full({1}, 0.5, torch::kDouble)); }
  torch::Tensor forward(const torch::Tensor& x) {
    return layer_call(*this, x, [&] { return torch::linear(x, mixing * mixing) * third + shift; });
  }
  torch::Tensor third;
};
TORCH_MODULE(Three);

TEST_F(RegisteredLayers, MayHaveAnyNumberOfParameters) {
  register_layer<ThreeImpl>([](const ThreeImpl& layer, const auto& input, const auto& g) {
    auto rows = mix_rows(layer, input, g);
    rows["mixing"] = rows["mixing"] * layer.third;
    const auto products = torch::linear(input, layer.mixing * layer.mixing);
    rows.insert("third", (g * products).sum(1, /*keepdim=*/true));
    return rows;
  });
  nn::Sequential model(nn::Linear(5, 4), Three(), nn::Tanh(), nn::Linear(4, 3));
  model->to(torch::kDouble);
  expect_all(model, make_batch(0, {5}));
}

struct InPlaceImpl : public MixImpl {
  torch::Tensor forward(const torch::Tensor& x) {
    return layer_call(*this, x, [&] { return x.mul_(mixing[0] * shift); });
  }
};
TORCH_MODULE(InPlace);

// A linear layer in a class of its own, which K-FAC sees by its operator.
struct OwnLinearImpl : public nn::Module {
  OwnLinearImpl() {
    torch::manual_seed(8);
    weight = register_parameter("weight", torch::randn({3, 4}, torch::kDouble));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return layer_call(*this, x, [&] { return torch::linear(x, weight); });
  }
  torch::Tensor weight;
};
TORCH_MODULE(OwnLinear);

TEST_F(RegisteredLayers, AreComputedOneByOneInPlace) {
  register_layer<InPlaceImpl>([](const InPlaceImpl&, const auto&, const auto&) {
    ++uses;
    return SampleRows();
  });
  nn::Sequential model(nn::Linear(5, 4), InPlace());
  model->to(torch::kDouble);
  const auto batch = make_batch(0, {5});
  const auto expected = reference_rows(model, batch);
  const ForwardFunction forward = [&](const auto& x) { return model->forward(x); };
  const auto rows =
      per_sample_gradients(*model, forward, cross_entropy, batch.inputs, batch.targets);
  for (const auto& [name, row] : expected.pairs()) {
    expect_near(rows[name], row, 1e-10);
  }
  PerSample scope(*model);
  cross_entropy(model->forward(batch.inputs), batch.targets).backward();
  expect_contains(refusal([&] { scope.grad_samples(); }), "depends on the parameter");
  EXPECT_EQ(uses, 0);
}

TEST_F(RegisteredLayers, AreOperatorsForKfac) {
  register_layer<OwnLinearImpl>([](const OwnLinearImpl&, const auto&, const auto&) {
    ++uses;
    return SampleRows();
  });
  nn::Sequential model(nn::Linear(5, 4), OwnLinear());
  model->to(torch::kDouble);
  const auto batch = make_batch(0, {5});
  KFAC optimizer(*model);
  PerSample scope(*model);
  cross_entropy(model->forward(batch.inputs), batch.targets).backward();
  const Warnings warnings;
  optimizer.step();
  EXPECT_EQ(warnings.text, "");
  EXPECT_EQ(optimizer.report().preconditioned.size(), 3U);
  EXPECT_EQ(uses, 0);
}

TEST_F(RegisteredLayers, RefuseWrongRows) {
  const auto refuses = [](const SampleRows& rows, const std::string& part) {
    register_layer<MixImpl>([&](const MixImpl&, const auto&, const auto&) { return rows; });
    nn::Sequential model{Mix()};
    const auto batch = make_batch(0, {4});
    const auto message = refusal([&] {
      per_sample_gradients(
          *model, [&](const auto& x) { return model->forward(x); }, cross_entropy, batch.inputs,
          batch.targets);
    });
    expect_contains(message, "MixImpl returned " + part);
  };
  refuses({}, "no tensor 'mixing'");
  refuses({{"mixing", torch::zeros({6, 4})}}, "shape [6, 4]");
  refuses({{"mixing", torch::zeros({6, 4, 4}, torch::kLong)}}, "type Long");
  expect_contains(refusal([] { register_layer<nn::LinearImpl>(nullptr); }),
                  "LinearImpl of libtorch");
  expect_contains(refusal([] { register_layer<MixImpl>(nullptr); }), "there is no formula for");
}

struct FactorImpl : public nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return layer_call(*this, x, [&] { return factor * x; });
  }
  torch::Tensor factor = register_parameter("factor", torch::full({}, 1.5, torch::kDouble));
};
TORCH_MODULE(Factor);

TEST_F(RegisteredLayers, MayHaveParametersWithoutDimensions) {
  register_layer<FactorImpl>([](const FactorImpl&, const auto& input, const auto& g) {
    return SampleRows{{"factor", (input * g).sum(1)}};
  });
  nn::Sequential model{Factor()};
  const auto batch = make_batch(0, {3});
  const auto expected = reference_rows(model, batch)["0.factor"];
  const ForwardFunction forward = [&](const auto& x) { return model->forward(x); };
  const Warnings warnings;
  const auto norms =
      gradients::per_sample_norms(*model, forward, cross_entropy, batch.inputs, batch.targets);
  expect_near(norms, expected.abs(), 1e-10);
  PerSample scope(*model);
  cross_entropy(model->forward(batch.inputs), batch.targets).backward();
  expect_near(scope.grad_sample("0.factor"), expected, 1e-10);
  EXPECT_EQ(warnings.text, "");
}

TEST_F(RegisteredLayers, WithoutAFormulaAreTheirForward) {
  struct Plain : public MixImpl {
    torch::Tensor forward(const torch::Tensor& x) {
      return layer_call(*this, x, [&] { return x * shift; });
    }
  };
  Plain layer;
  const auto x = torch::randn({3, 4}, torch::kDouble);
  EXPECT_TRUE(torch::equal(layer.forward(x), x * layer.shift));
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(torch::equal(Mix()->forward(x), Mix()->forward(x)));
}

}  // namespace
}  // namespace torchium::testing
