// K-FAC and natural gradient must not step on captures that do not account for the whole gradient:
// uncaptured calls, and several processes.
#include "gradients/capture/operator_capture.h"
#include "model_testing.h"
#include "torchium/optim/kfac.h"
#include "torchium/optim/natural_gradient.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <set>

namespace torchium::testing {
namespace {

namespace F = torch::nn::functional;
using gradients::detail::OperatorCapture;
using optim::KFAC;
using optim::KFACOptions;
using optim::NaturalGradient;
using optim::NaturalGradientOptions;

// The parameters for which backward() of the loss finds an uncaptured call.
template <typename Loss>
std::set<size_t> used_otherwise(const Tensors& params, Loss&& loss) {
  OperatorCapture capture(params, [](const auto&, const auto&) {});
  capture.set_enabled(true);
  loss().backward();
  capture.raise_error();
  std::set<size_t> result;
  for (size_t i = 0; i < params.size(); ++i) {
    if (capture.is_used_otherwise(params[i])) {
      result.insert(i);
    }
  }
  return result;
}

using Positions = std::set<size_t>;

// ---- captured and uncaptured calls

class InputShapes : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(InputShapes, OfLinearLayersAreNoOtherUses) {
  using Function = std::function<torch::Tensor(torch::Tensor, torch::Tensor, torch::Tensor)>;
  const std::vector<Function> functions{
      [](auto x, auto w, auto b) { return torch::linear(x, w, b); },
      [](auto x, auto w, auto b) { return F::linear(x, w, b); },
      [](auto x, auto w, auto b) { return x.matmul(w.t()).add_(b); },
      [](auto x, auto w, auto b) { return x.matmul(w.mT()) + b; },
      [](auto x, auto w, auto b) { return torch::linear(torch::linear(x, w, b).tanh(), w, b); },
  };
  for (size_t i = 0; i < functions.size(); ++i) {
    for (const bool in_place : {true, false}) {
      for (const bool trained_input : {true, false}) {
        SCOPED_TRACE(i);
        const Tensors params{parameter(torch::randn({3, 3})), parameter(torch::randn({3}))};
        const auto x = torch::randn(GetParam()).requires_grad_(trained_input);
        EXPECT_EQ(used_otherwise(params,
                                 [&] {
                                   const auto y = functions[i](x, params[0], params[1]);
                                   return (in_place ? y.relu_() : y.relu()).square().sum();
                                 }),
                  Positions());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, InputShapes,
                         ::testing::Values(std::vector<int64_t>{5, 3}, std::vector<int64_t>{3},
                                           std::vector<int64_t>{2, 5, 3},
                                           std::vector<int64_t>{2, 1, 4, 3}));

TEST(OtherUses, AreNotSeenInStockModels) {
  torch::manual_seed(1);
  const auto images = torch::randn({2, 3, 7, 7});
  const auto none = [](nn::Sequential model, const torch::Tensor& input) {
    const auto found =
        used_otherwise(model->parameters(), [&] { return model->forward(input).square().sum(); });
    EXPECT_EQ(found, Positions()) << *model;
  };
  none(nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 4, 3).stride(2)), nn::GroupNorm(2, 4),
                      nn::ReLU(nn::ReLUOptions(true)), nn::Conv2d(4, 2, 2), nn::Flatten(),
                      nn::Linear(8, 3)),
       images);
  // An even kernel: the input is padded on one side before it is captured.
  none(nn::Sequential(nn::Conv2d(3, 4, 3),
                      nn::Conv2d(nn::Conv2dOptions(4, 2, 2).padding(torch::kSame).bias(false))),
       images);
  none(nn::Sequential(nn::Embedding(5, 4), nn::LayerNorm(nn::LayerNormOptions({4})),
                      nn::Linear(4, 4), nn::ReLU(nn::ReLUOptions(true)), nn::Linear(4, 2)),
       torch::tensor({{0, 1, 2}, {3, 4, 4}}));
}

TEST(OtherUses, AreNotSeenWhereAWeightIsTied) {
  const Tensors params{parameter(torch::randn({5, 3}))};
  const auto indices = torch::tensor({{0, 1}, {3, 4}});
  const auto loss = [&] {
    return torch::linear(torch::embedding(params[0], indices), params[0]).square().sum();
  };
  EXPECT_EQ(used_otherwise(params, loss), Positions());
}

TEST(OtherUses, AreNotSeenUnderAutocast) {
  const Tensors params{parameter(torch::randn({4, 3})), parameter(torch::randn({4}))};
  const auto x = torch::randn({2, 5, 3});
  at::autocast::set_autocast_enabled(torch::kCPU, true);
  const auto found = used_otherwise(params, [&] {
    return F::linear(x, params[0], params[1]).relu_().to(torch::kFloat).square().sum();
  });
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(torch::kCPU, false);
  EXPECT_EQ(found, Positions());
}

TEST(OtherUses, AreSeen) {
  const auto x = torch::randn({3, 3});
  using Function = std::function<torch::Tensor(torch::Tensor, torch::Tensor)>;
  const auto layer = [&](const torch::Tensor& w, const torch::Tensor& b) {
    return torch::linear(x, w, b).square().sum();
  };
  const std::vector<std::pair<Function, Positions>> cases{
      {[&](auto w, auto b) { return layer(w, b) + w.square().sum(); }, {0}},  // a penalty
      {[&](auto w, auto b) { return layer(w, b) + w.norm() + b.norm(); }, {0, 1}},
      {[&](auto w, auto b) { return layer(w, b) * b.dot(b); }, {1}},
      // In the graph of the captured layer.
      {[&](auto w, auto b) { return torch::linear(torch::linear(x, w) * b, w, b).sum() * 1; }, {1}},
      {[&](auto w, auto b) { return torch::linear(w.matmul(x).tanh(), w, b).sum() * 1; }, {0}},
      {[&](auto w, auto b) { return torch::linear(w, w, b).sum() * 1; }, {0}},
      // After the bias of another layer, whose weight is a function of this one.
      {[&](auto w, auto b) { return layer(w, {}) + layer(2 * w, b); }, {0}},
      {[&](auto w, auto b) { return layer(w, b) + layer(w.slice(0, 0, 2), {}); }, {0}},
      {[&](auto w, auto b) { return layer(w, b) + torch::addmm(x, x, w.t(), 1, 2).sum(); }, {0}},
      {[&](auto w, auto b) { return layer(w, b) + x.matmul(w.t()).add_(2 * b).sum(); }, {1}},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    const Tensors params{parameter(torch::randn({3, 3})), parameter(torch::randn({3}))};
    EXPECT_EQ(used_otherwise(params, [&] { return cases[i].first(params[0], params[1]); }),
              cases[i].second);
  }
}

TEST(OtherUses, AreSeenIfTheyAreNoPartOfTheSum) {
  nn::Linear layer(3, 2);
  const auto x = torch::randn({4, 3});
  const auto loss = [&] { return layer(x).square().sum() + layer->weight.square().sum(); };
  {  // What autograd::grad() computes is not accumulated in .grad.
    OperatorCapture capture(layer->parameters(), [](const auto&, const auto&) {});
    capture.set_enabled(true);
    torch::autograd::grad({loss()}, {layer->bias});
    EXPECT_FALSE(capture.is_used_otherwise(layer->weight));
  }
  {  // Of two backward passes with separate graphs, one has the captured call.
    OperatorCapture capture(layer->parameters(), [](const auto&, const auto&) {});
    capture.set_enabled(true);
    layer(x).square().sum().backward();
    layer->weight.square().sum().backward();
    EXPECT_FALSE(capture.is_used_otherwise(layer->weight));
  }
  EXPECT_EQ(used_otherwise(layer->parameters(), loss), Positions({0}));
}

TEST(OtherUses, OfManyGraphsThatWereNotUsedAreNoMatter) {
  nn::Linear layer(3, 2);
  const auto x = torch::randn({4, 3});
  OperatorCapture capture(layer->parameters(), [](const auto&, const auto&) {});
  capture.set_enabled(true);
  const auto early = layer(x).square().sum();
  for (int i = 0; i < 300; ++i) {
    layer(x);
  }
  capture.forget();
  (early + layer(x).sum()).backward();
  EXPECT_FALSE(capture.is_used_otherwise(layer->weight));
  EXPECT_FALSE(capture.is_used_otherwise(layer->bias));
}

// ---- how the optimizers handle them

struct TiedOutside : public nn::Module {
  TiedOutside() {
    table = register_module("table", nn::Linear(3, 3));
    head = register_module("head", nn::Linear(3, 3));
  }
  torch::Tensor loss(const Batch& batch) {
    const auto y = head(table(batch.inputs).tanh()).matmul(table->weight);
    return cross_entropy(y, batch.targets);
  }
  nn::Linear table{nullptr};
  nn::Linear head{nullptr};
};

Batch small_batch(int step) { return make_batch(step, {3}, 6, torch::kFloat); }

TEST(CaptureSafety, NaturalGradientRefusesAWeightThatIsUsedOtherwise) {
  TiedOutside model;
  NaturalGradient optimizer(model, NaturalGradientOptions(0.1));
  const auto before = copies(model.parameters());
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    const auto batch = small_batch(step);
    const auto x = model.head(model.table(batch.inputs).tanh());
    cross_entropy(x.matmul(2.0 * model.table->weight), batch.targets).backward();
    const auto message = message_of<c10::ValueError>([&] { optimizer.step(); });
    expect_contains(message, "the gradient of 'table.weight', parameter 0 of group 0");
    expect_contains(message, "does not come from its layer alone");
  }
  expect_equal(copies(model.parameters()), before);
  EXPECT_TRUE(all_state(optimizer).empty());
}

TEST(CaptureSafety, AWeightThatIsUsedAsBothMatricesHasItsRows) {
  TiedOutside model;
  const auto batch = small_batch(0);
  const auto rows = per_sample_gradients(
      model,
      [&](const torch::Tensor& x) {
        return model.head(model.table(x).tanh()).matmul(model.table->weight);
      },
      [](const auto& y, const auto& t) { return cross_entropy(y, t); }, batch.inputs,
      batch.targets);
  for (int64_t i = 0; i < batch.targets.size(0); ++i) {
    const auto loss = model.loss({batch.inputs.narrow(0, i, 1), batch.targets.narrow(0, i, 1)});
    const auto expected = torch::autograd::grad({loss}, {model.table->weight});
    expect_near(rows["table.weight"][i], expected[0], 1e-5);
  }
}

TEST(CaptureSafety, NaturalGradientTakesWhatIsAddedToGradients) {
  auto model = make_mlp();
  model[0]->as<nn::Linear>()->weight.register_hook([](const torch::Tensor& g) { return 2 * g; });
  NaturalGradient optimizer(*model, NaturalGradientOptions(0.1));
  const auto before = copies(model->parameters());
  const auto batch = make_batch(0, kMlpSample);
  cross_entropy(model->forward(batch.inputs), batch.targets).backward();
  for (auto& param : model->parameters()) {
    param.mutable_grad().add_(param.detach(), 0.01);
  }
  optimizer.step();
  EXPECT_FALSE(torch::equal(model->parameters()[0], before[0]));
}

TEST(CaptureSafety, KfacFallsBackForAWeightThatIsUsedOtherwise) {
  TiedOutside model;
  TiedOutside twin;
  KFAC optimizer(model, KFACOptions(0.1).TCov(2).kl_clip(std::nullopt));
  torch::optim::SGD sgd(twin.table->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  copy_parameters(*model.table, *twin.table);
  Warnings warnings;
  for (int step = 0; step < 4; ++step) {  // also where no factors are due
    optimizer.zero_grad();
    model.loss(small_batch(step)).backward();
    set_grad(twin.table->weight, model.table->weight.grad());
    set_grad(twin.table->bias, model.table->bias.grad());
    optimizer.step();
    sgd.step();
    EXPECT_EQ(optimizer.report().fallback,
              (std::vector<std::string>{"table.weight", "table.bias"}));
    EXPECT_EQ(optimizer.report().preconditioned,
              (std::vector<std::string>{"head.weight", "head.bias"}));
  }
  expect_near(model.table->weight, twin.table->weight, 1e-6);
  expect_near(model.table->bias, twin.table->bias, 1e-6);
  expect_contains(warnings.text, "1 (used as [in, out] and as [out, in]: table.weight)");
}

// The gradient of a model whose loss has a penalty on a weight only in some steps.
torch::Tensor penalized(nn::Sequential& model, int step, bool has_penalty) {
  const auto batch = make_batch(step, kMlpSample);
  const auto loss = cross_entropy(model->forward(batch.inputs), batch.targets);
  return has_penalty ? loss + model[0]->as<nn::Linear>()->weight.square().sum() : loss;
}

TEST(CaptureSafety, NaturalGradientRefusesAUseThatBeginsLater) {
  auto model = make_mlp();
  NaturalGradient optimizer(*model, NaturalGradientOptions(0.1));
  for (int step = 0; step < 5; ++step) {
    const bool has_penalty = step == 2 || step == 3;
    optimizer.zero_grad();
    penalized(model, step, has_penalty).backward();
    if (has_penalty) {
      const auto message = message_of<c10::ValueError>([&] { optimizer.step(); });
      expect_contains(message, "does not come from its layer alone");
    } else {
      optimizer.step();
    }
  }
}

TEST(CaptureSafety, KfacFallsBackAsLongAsAWeightIsUsedOtherwise) {
  auto model = make_mlp();
  KFAC optimizer(*model, KFACOptions(0.1).TCov(2));
  const std::vector<size_t> fallbacks{2, 2, 0, 0,
                                      2, 2, 0};  // of weight and bias, since the capture
  Warnings warnings;
  for (int step = 0; step < 7; ++step) {
    optimizer.zero_grad();
    penalized(model, step, step == 0 || step == 3 || step == 4).backward();
    optimizer.step();
    EXPECT_EQ(optimizer.report().fallback.size(), fallbacks[step]) << step;
  }
}

TEST(CaptureSafety, KfacWarnsOnceOfTwoBackwardPassesOverOneGraph) {
  auto model = make_mlp();
  KFAC optimizer(*model, KFACOptions(0.1));
  Warnings warnings;
  for (int step = 0; step < 3; ++step) {
    const auto batch = make_batch(step, kMlpSample);
    const auto loss = cross_entropy(model->forward(batch.inputs), batch.targets);
    loss.backward({}, /*retain_graph=*/true);
    optimizer.zero_grad();  // forgets the first pass
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_EQ(warnings.text.empty(), step == 0);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  const std::string beginning =
      "a second backward pass has reached the same call of a linear layer";
  expect_contains(warnings.text, beginning);
  EXPECT_EQ(warnings.text.find(beginning, 1), std::string::npos);
}

TEST(CaptureSafety, NaturalGradientCountsTheSamplesOfOneGraphOnce) {
  const auto trained = [](const std::function<void(const torch::Tensor&, const Tensors&)>& run) {
    auto model = make_mlp();
    NaturalGradient optimizer(*model, NaturalGradientOptions(0.1).damping(0.05));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const auto batch = make_batch(step, kMlpSample);
      run(cross_entropy(model->forward(batch.inputs), batch.targets), model->parameters());
      optimizer.step();
      EXPECT_EQ(optimizer.report().samples, batch.inputs.size(0));
    }
    return copies(model->parameters());
  };
  const auto expected = trained([](const auto& loss, const auto&) { loss.backward(); });
  const auto in_parts = [&](bool front_first) {
    return trained([&](const auto& loss, const auto& params) {
      const Tensors front(params.begin(), params.begin() + 2);
      const Tensors back(params.begin() + 2, params.end());
      loss.backward({}, /*retain_graph=*/true, /*create_graph=*/false, front_first ? front : back);
      loss.backward({}, /*retain_graph=*/false, /*create_graph=*/false, front_first ? back : front);
    });
  };
  const auto of_two_losses = trained([](const auto& loss, const auto&) {
    (0.25 * loss).backward({}, /*retain_graph=*/true);
    (0.75 * loss).backward();
  });
  Warnings warnings;
  for (const auto& actual : {in_parts(true), in_parts(false), of_two_losses}) {
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-5, 1e-7)) << i;
    }
  }
  EXPECT_EQ(warnings.text, "");
}

// ---- several processes

// Sends nothing.
class Silent : public c10d::Backend {
 public:
  using c10d::Backend::Backend;
  const std::string getBackendName() const override { return "silent"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&,
                                           const c10d::AllreduceOptions&) override {
    return c10::make_intrusive<c10d::Work>();
  }
};

void all_reduce(int processes, const Tensors& params) {
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(/*rank=*/0, processes);
  group->setBackend(torch::kCPU, c10d::ProcessGroup::CUSTOM,
                    c10::make_intrusive<Silent>(/*rank=*/0, processes));
  Tensors gradients;
  for (const auto& param : params) {
    gradients.push_back(param.grad());
  }
  const torch::NoGradGuard no_grad;
  group->allreduce(gradients);
}

template <typename Optimizer, typename Options>
void expect_one_process(const char* name, const Options& options) {
  auto model = make_mlp();
  Optimizer optimizer(*model, options);
  const auto backward = [&] {
    const auto batch = make_batch(0, kMlpSample);
    cross_entropy(model->forward(batch.inputs), batch.targets).backward();
  };
  const auto before = copies(model->parameters());
  backward();
  all_reduce(2, model->parameters());
  expect_contains(
      message_of<c10::Error>([&] { optimizer.step(); }),
      std::string(name) + " has no process_group, but 2 processes have exchanged tensors");
  expect_equal(copies(model->parameters()), before);
  EXPECT_TRUE(all_state(optimizer).empty());

  optimizer.zero_grad();
  backward();
  all_reduce(1, model->parameters());
  optimizer.step();
  EXPECT_FALSE(torch::equal(model->parameters()[0], before[0]));
}

TEST(CaptureSafety, SeveralProcessesAreRefused) {
  expect_one_process<KFAC>("KFAC", KFACOptions(0.1));
  expect_one_process<NaturalGradient>("NaturalGradient", NaturalGradientOptions(0.1));
}

}  // namespace
}  // namespace torchium::testing
