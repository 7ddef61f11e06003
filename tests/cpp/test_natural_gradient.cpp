// Natural gradient and per-sample gradients on stock torch::nn models. test_parity.py compares them
// with Python.
#include "model_testing.h"
#include "torchium/gradients.h"
#include "torchium/optim/natural_gradient.h"

#include <cmath>

namespace torchium::testing {
namespace {

using optim::NaturalGradient;
using optim::NaturalGradientOptions;
using torch::optim::OptimizerParamGroup;

// An embedding, a norm, and the embedding again as the output layer.
struct Tied : public nn::Module {
  explicit Tied(torch::Dtype dtype = torch::kDouble) {
    torch::manual_seed(3);
    embedding = register_module("embedding", nn::Embedding(6, 4));
    hidden = register_module("hidden", nn::Linear(4, 4));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({4})));
    to(dtype);
  }
  torch::Tensor forward(const torch::Tensor& indices) {
    auto x = torch::tanh(hidden(embedding(indices)));
    x = torch::tanh(norm(hidden(x)));
    return torch::linear(x, embedding->weight).transpose(1, 2);  // [batch, 6, positions]
  }
  nn::Embedding embedding{nullptr};
  nn::Linear hidden{nullptr};
  nn::LayerNorm norm{nullptr};
};

// A model, what it is called with at a step, and the mean loss.
struct Problem {
  std::string name;
  std::function<std::shared_ptr<nn::Module>(torch::Dtype)> make;
  std::function<torch::Tensor(nn::Module&, const torch::Tensor&)> forward;
  std::function<Batch(int, torch::Dtype)> batch;
};

torch::Tensor run_sequential(nn::Module& model, const torch::Tensor& x) {
  return static_cast<nn::SequentialImpl&>(model).forward(x);
}

std::vector<Problem> problems() {
  return {{"mlp", [](auto dtype) { return make_mlp(dtype).ptr(); }, &run_sequential,
           [](int step, auto dtype) { return make_batch(step, kMlpSample, 6, dtype); }},
          {"convnet", [](auto dtype) { return make_convnet(dtype).ptr(); }, &run_sequential,
           [](int step, auto dtype) { return make_batch(step, kImageSample, 6, dtype); }},
          {"tied", [](auto dtype) { return std::make_shared<Tied>(dtype); },
           [](nn::Module& model, const torch::Tensor& x) {
             return static_cast<Tied&>(model).forward(x);
           },
           [](int step, auto) {
             auto generator = torch::make_generator<torch::CPUGeneratorImpl>(step);
             return Batch{torch::randint(6, {5, 3}, generator, torch::kLong),
                          torch::randint(6, {5, 3}, generator, torch::kLong)};
           }}};
}

torch::Tensor flatten(const Tensors& tensors) {
  Tensors flat;
  for (const auto& tensor : tensors) {
    flat.push_back(tensor.detach().reshape({-1}));
  }
  return torch::cat(flat);
}

// The gradients of single samples, one backward pass each: [n, P].
torch::Tensor dense_jacobian(const Problem& problem, nn::Module& model, const Batch& batch) {
  Tensors rows;
  for (int64_t i = 0; i < batch.targets.size(0); ++i) {
    const auto output = problem.forward(model, batch.inputs.narrow(0, i, 1));
    const auto loss = cross_entropy(output, batch.targets.narrow(0, i, 1));
    rows.push_back(flatten(torch::autograd::grad({loss}, model.parameters())));
  }
  return torch::stack(rows);
}

// d <- mu d + (F + damping)^-1 (v - F mu d), by a dense solve.
class Reference {
 public:
  Reference(const Problem& problem, std::shared_ptr<nn::Module> model,
            NaturalGradientOptions options)
      : problem_(problem), model_(std::move(model)), o_(std::move(options)) {}

  void step(const Batch& batch) {
    const auto J = dense_jacobian(problem_, *model_, batch);
    const auto v = J.mean(0);
    if (step_ % o_.update_freq() == 0) {
      F_ = J.t().mm(J) / J.size(0);
    }
    const auto I = torch::eye(F_.size(0), F_.options());
    const auto momentum = d_.defined() ? o_.momentum() * d_ : torch::zeros_like(v);
    d_ = momentum + torch::linalg_solve(F_ + o_.damping() * I, v - F_.mv(momentum));
    const double norm = d_.norm().item<double>();
    const double factor = o_.max_norm() ? std::min(1.0, *o_.max_norm() / norm) : 1.0;
    const torch::NoGradGuard no_grad;
    int64_t first = 0;
    for (auto param : model_->parameters()) {
      param.sub_(o_.lr() * factor * d_.narrow(0, first, param.numel()).view_as(param));
      first += param.numel();
    }
    ++step_;
  }

 private:
  const Problem& problem_;
  std::shared_ptr<nn::Module> model_;
  NaturalGradientOptions o_;
  int64_t step_ = 0;
  torch::Tensor F_, d_;
};

void train_step(NaturalGradient& optimizer, const Problem& problem, nn::Module& model,
                const Batch& batch) {
  optimizer.zero_grad();
  cross_entropy(problem.forward(model, batch.inputs), batch.targets).backward();
  optimizer.step();
}

void train(NaturalGradient& optimizer, const Problem& problem, nn::Module& model, int first,
           int last) {
  const auto dtype = model.parameters()[0].scalar_type();
  for (int step = first; step < last; ++step) {
    train_step(optimizer, problem, model, problem.batch(step, dtype));
  }
}

void expect_close(const nn::Module& actual, const nn::Module& expected, double tolerance) {
  const auto difference = (flatten(actual.parameters()) - flatten(expected.parameters())).norm();
  EXPECT_LT(difference.item<double>(),
            tolerance * flatten(expected.parameters()).norm().item<double>());
}

class Problems : public ::testing::TestWithParam<Problem> {
 protected:
  std::shared_ptr<nn::Module> make(torch::Dtype dtype = torch::kDouble) {
    return GetParam().make(dtype);
  }

  void expect_follows_the_formulas(const NaturalGradientOptions& options, double tolerance,
                                   int steps = 4) {
    const auto model = make();
    const auto reference_model = make();
    NaturalGradient optimizer(*model, options);
    Reference reference(GetParam(), reference_model, options);
    for (int step = 0; step < steps; ++step) {
      const auto batch = GetParam().batch(step, torch::kDouble);
      train_step(optimizer, GetParam(), *model, batch);
      reference.step(batch);
    }
    expect_close(*model, *reference_model, tolerance);
  }
};

TEST_P(Problems, FollowTheDenseSolve) {
  for (const double damping : {1e-7, 1e-3, 1.0}) {
    SCOPED_TRACE(damping);
    const auto model = make();
    const auto before = flatten(model->parameters());
    const auto batch = GetParam().batch(0, torch::kDouble);
    const auto J = dense_jacobian(GetParam(), *model, batch);
    NaturalGradient optimizer(*model, NaturalGradientOptions(1.0).damping(damping).solver("gram"));
    train_step(optimizer, GetParam(), *model, batch);
    const auto d = before - flatten(model->parameters());
    // In the space of samples, which is exact also where F has no inverse.
    const auto K = J.mm(J.t()) / J.size(0) + damping * torch::eye(J.size(0), J.options());
    const auto w = torch::linalg_solve(K, torch::full({J.size(0)}, 1.0 / J.size(0), J.options()));
    const auto expected = J.t().mv(w);
    EXPECT_LT((d - expected).norm().item<double>(), 1e-6 * expected.norm().item<double>());
  }
}

TEST_P(Problems, FollowTheFormulas) {
  const auto options = NaturalGradientOptions(0.1).damping(0.01);
  for (const auto* solver : {"gram", "cg", "auto"}) {
    SCOPED_TRACE(solver);
    auto o = options;
    o.solver(solver).eps(1e-12);
    expect_follows_the_formulas(o, 1e-8);
    expect_follows_the_formulas(NaturalGradientOptions(o).momentum(0.9), 1e-8);
    expect_follows_the_formulas(NaturalGradientOptions(o).max_norm(0.5), 1e-8);
    expect_follows_the_formulas(NaturalGradientOptions(o).update_freq(3).momentum(0.5), 1e-8, 7);
  }
}

TEST_P(Problems, TakeMicroBatchesAsOneBatch) {
  const auto options = NaturalGradientOptions(0.1).damping(0.01).momentum(0.5);
  const auto model = make();
  const auto usual_model = make();
  NaturalGradient optimizer(*model, options);
  NaturalGradient usual(*usual_model, options);
  for (int step = 0; step < 3; ++step) {
    const auto batch = GetParam().batch(step, torch::kDouble);
    train_step(usual, GetParam(), *usual_model, batch);
    model->zero_grad();
    cross_entropy(GetParam().forward(*model, 3 * batch.inputs.clone().clamp(0, 1)), batch.targets)
        .backward();  // dropped with its gradients
    model->zero_grad();
    GetParam().forward(*model, batch.inputs);  // no backward pass
    const auto n = batch.targets.size(0);
    for (const auto& [first, size] :
         {std::pair(int64_t{0}, int64_t{2}), std::pair(int64_t{2}, n - 2)}) {
      const auto output = GetParam().forward(*model, batch.inputs.narrow(0, first, size));
      (cross_entropy(output, batch.targets.narrow(0, first, size)) * size / n).backward();
    }
    optimizer.step();
  }
  expect_close(*model, *usual_model, 1e-9);
}

TEST_P(Problems, ContinueFromAnArchive) {
  for (const int64_t update_freq : {1, 3}) {
    for (int pause = 1; pause < 5; ++pause) {
      SCOPED_TRACE(::testing::Message() << update_freq << ", " << pause);
      const auto options =
          NaturalGradientOptions(0.05).momentum(0.5).update_freq(update_freq).damping(0.1);
      const auto model = make(torch::kFloat);
      NaturalGradient optimizer(*model, options);
      train(optimizer, GetParam(), *model, 0, pause);
      const auto data = saved(optimizer);
      const auto resumed_model = make(torch::kFloat);
      copy_parameters(*model, *resumed_model);
      train(optimizer, GetParam(), *model, pause, 6);

      NaturalGradient resumed(*resumed_model, options);
      load(resumed, data);
      train(resumed, GetParam(), *resumed_model, pause, 6);
      expect_equal(copies(resumed_model->parameters()), copies(model->parameters()));
      expect_equal(all_state(resumed), all_state(optimizer));
    }
  }
}

TEST_P(Problems, HavePerSampleGradients) {
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    const auto model = make(dtype);
    const auto batch = GetParam().batch(0, dtype);
    const auto expected = dense_jacobian(GetParam(), *model, batch);
    const torch::NoGradGuard no_grad;
    const auto gradients = per_sample_gradients(
        *model, [&](const torch::Tensor& x) { return GetParam().forward(*model, x); },
        &cross_entropy, batch.inputs, batch.targets);
    const auto params = model->named_parameters();
    ASSERT_EQ(gradients.keys(), params.keys());
    Tensors rows;
    for (const auto& [name, gradient] : gradients.pairs()) {
      EXPECT_EQ(gradient.scalar_type(), dtype);
      EXPECT_FALSE(params[name].grad().defined());
      EXPECT_EQ(gradient.sizes().slice(1), params[name].sizes());
      rows.push_back(gradient.flatten(1));
    }
    expect_near(torch::cat(rows, 1), expected, dtype == torch::kDouble ? 1e-10 : 1e-4);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Problems, ::testing::ValuesIn(problems()),
                         [](const auto& info) { return info.param.name; });

// ---- the optimizer

// A gradient that is not the mean of the captured ones: decayed, clipped, or both.
TEST(NaturalGradientTest, TakesChangedGradients) {
  const double damping = 0.02;
  auto model = make_mlp();
  const auto before = flatten(model->parameters());
  const Problem problem = problems()[0];
  const auto batch = problem.batch(0, torch::kDouble);
  const auto J = dense_jacobian(problem, *model, batch);
  const auto v = 0.5 * J.mean(0) + 0.1 * before;
  NaturalGradient optimizer(*model, NaturalGradientOptions(1.0).damping(damping));
  cross_entropy(model->forward(batch.inputs), batch.targets).backward();
  for (auto& param : model->parameters()) {
    param.mutable_grad() = 0.5 * param.grad() + 0.1 * param.detach();
  }
  optimizer.step();
  const auto F = J.t().mm(J) / J.size(0);
  const auto expected = torch::linalg_solve(F + damping * torch::eye(v.size(0), v.options()), v);
  expect_near(before - flatten(model->parameters()), expected, 1e-8);
}

TEST(NaturalGradientTest, ReportsHowItSolved) {
  const Problem problem = problems()[0];
  auto model = make_mlp();
  NaturalGradient gram(*model);
  EXPECT_EQ(gram.report().solver, "");
  train(gram, problem, *model, 0, 1);
  EXPECT_EQ(gram.report().solver, "gram");
  EXPECT_EQ(gram.report().samples, 6);
  EXPECT_EQ(gram.report().iterations, 0);
  NaturalGradient cg(*model, NaturalGradientOptions(0.1).solver("cg"));
  train(cg, problem, *model, 0, 1);
  EXPECT_EQ(cg.report().solver, "cg");
  EXPECT_GT(cg.report().iterations, 0);
  EXPECT_LT(cg.report().relative_residual, 1e-8);
}

TEST(NaturalGradientTest, GivesEveryGroupItsOptions) {
  const Problem problem = problems()[0];
  const auto groups_of = [](const nn::Sequential& model, const NaturalGradientOptions& second) {
    const auto params = model->parameters();
    return std::vector<OptimizerParamGroup>{
        OptimizerParamGroup({params[0], params[1]}),
        OptimizerParamGroup({params[2], params[3], params[4], params[5]},
                            std::make_unique<NaturalGradientOptions>(second))};
  };
  auto model = make_mlp();
  auto whole_model = make_mlp();
  NaturalGradient split(*model, groups_of(model, NaturalGradientOptions(0.05)),
                        NaturalGradientOptions(0.05));
  NaturalGradient whole(*whole_model, NaturalGradientOptions(0.05));
  train(split, problem, *model, 0, 4);
  train(whole, problem, *whole_model, 0, 4);
  expect_equal(copies(model->parameters()), copies(whole_model->parameters()));

  auto other_model = make_mlp();
  const auto before = flatten(other_model->parameters());
  const auto batch = problem.batch(0, torch::kDouble);
  const auto J = dense_jacobian(problem, *other_model, batch);
  NaturalGradient optimizer(
      *other_model, groups_of(other_model, NaturalGradientOptions(0.5).damping(0.3).maximize(true)),
      NaturalGradientOptions(2.0).damping(0.1));
  train_step(optimizer, problem, *other_model, batch);
  const auto count = 5 * 7 + 7;
  auto lambda = torch::full({J.size(1)}, 0.3, J.options());
  lambda.narrow(0, 0, count).fill_(0.1);
  auto step = torch::full({J.size(1)}, -0.5, J.options());
  step.narrow(0, 0, count).fill_(2.0);
  const auto d = torch::linalg_solve(J.t().mm(J) / J.size(0) + lambda.diag(), J.mean(0));
  expect_near(before - flatten(other_model->parameters()), step * d, 1e-9);
}

TEST(NaturalGradientTest, LeavesFrozenAndUnusedParametersAlone) {
  nn::Linear used(5, 4);
  nn::Linear partly(4, 3);
  nn::Linear unused(4, 4);
  nn::Sequential model(used, nn::Tanh(), partly, unused);
  model->to(torch::kDouble);
  partly->weight.set_requires_grad(false);
  NaturalGradient optimizer(*model, NaturalGradientOptions(1.0).damping(0.1));
  const auto before = copies(model->parameters());
  const auto batch = make_batch(0, kMlpSample);
  Tensors rows;
  const Tensors active{used->weight, used->bias, partly->bias};
  for (int64_t i = 0; i < 6; ++i) {
    const auto y = partly(used(batch.inputs.narrow(0, i, 1)).tanh());
    const auto loss = cross_entropy(y, batch.targets.narrow(0, i, 1));
    rows.push_back(flatten(torch::autograd::grad({loss}, active)));
  }
  const auto J = torch::stack(rows);
  cross_entropy(partly(used(batch.inputs).tanh()), batch.targets).backward();
  optimizer.step();
  const auto d =
      torch::linalg_solve(J.t().mm(J) / 6 + 0.1 * torch::eye(J.size(1), J.options()), J.mean(0));
  expect_near(flatten({before[0], before[1], before[3]}) - flatten(active), d, 1e-9);
  EXPECT_TRUE(torch::equal(partly->weight, before[2]));
  EXPECT_TRUE(torch::equal(unused->weight, before[4]));
}

TEST(NaturalGradientTest, RunsWithLowPrecisionParameters) {
  auto model = make_mlp(torch::kBFloat16);
  const Problem problem = problems()[0];
  NaturalGradient optimizer(*model, NaturalGradientOptions(0.05).momentum(0.5).update_freq(2));
  train(optimizer, problem, *model, 0, 4);
  for (const auto& param : model->parameters()) {
    EXPECT_TRUE(param.isfinite().all().item<bool>());
  }
  const auto state = state_tensors(optimizer, model->parameters()[0]);
  EXPECT_EQ(state[1].first, "momentum_buffer");
  EXPECT_EQ(state[1].second.scalar_type(), torch::kFloat);
}

TEST(NaturalGradientTest, LearnsFasterThanMomentum) {
  auto model = make_mlp();
  NaturalGradient natural(*model, NaturalGradientOptions(0.1).damping(0.01));
  expect_faster_than_momentum(natural, model, 0.5);
}

// ---- refusals

template <typename Action>
std::string refusal(Action&& action) {
  return message_of<c10::ValueError>(std::forward<Action>(action));
}

TEST(NaturalGradientTest, RefusesUnsupportedLayersByName) {
  const auto refuses = [](nn::Sequential model, const std::string& part) {
    expect_contains(refusal([&] { NaturalGradient optimizer(*model); }), part);
    for (auto& param : model->parameters()) {
      param.set_requires_grad(false);
    }
    NaturalGradient optimizer(*model);  // nothing to be refused
  };
  refuses(nn::Sequential(nn::Linear(2, 3), nn::LSTM(3, 4)), "layer '1' (LSTM)");
  refuses(nn::Sequential(nn::GRU(3, 4)), "layer '0' (GRU)");
  refuses(nn::Sequential(nn::RNN(3, 4)), "layer '0' (RNN)");
  refuses(nn::Sequential(nn::LSTMCell(3, 4)), "layer '0' (LSTMCell)");
  refuses(nn::Sequential(nn::MultiheadAttention(4, 2)), "layer '0' (MultiheadAttention)");
  refuses(nn::Sequential(nn::TransformerEncoderLayer(4, 2)), "layer '0.self_attn'");
  refuses(nn::Sequential(nn::Conv1d(2, 3, 3)), "layer '0' (Conv1d), which is of an unsupported");
  refuses(nn::Sequential(nn::ConvTranspose2d(2, 3, 3)), "layer '0' (ConvTranspose2d)");
  refuses(nn::Sequential(nn::BatchNorm2d(3)), "layer '0' (BatchNorm2d)");
  refuses(nn::Sequential(nn::PReLU()), "layer '0' (PReLU)");
  refuses(nn::Sequential(nn::Bilinear(2, 3, 4)), "layer '0' (Bilinear)");
  refuses(nn::Sequential(nn::EmbeddingBag(3, 4)), "layer '0' (EmbeddingBag)");
  refuses(nn::Sequential(nn::Embedding(nn::EmbeddingOptions(3, 4).sparse(true))),
          "layer '0' (Embedding), which has sparse = true");
  refuses(nn::Sequential(nn::Embedding(nn::EmbeddingOptions(3, 4).max_norm(1.0))), "max_norm");
  refuses(nn::Sequential(nn::Embedding(nn::EmbeddingOptions(3, 4).scale_grad_by_freq(true))),
          "scale_grad_by_freq = true");
}

// Each refusal leaves parameters and state alone, and the next step is a good one.
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
      "has seen 2 samples in dimension 0 of its input, the layer of '0.weight' 6");

  nn::Module embeddings;
  nn::Embedding tokens = embeddings.register_module("tokens", nn::Embedding(9, 4));
  nn::Embedding positions = embeddings.register_module("positions", nn::Embedding(3, 4));
  expect_refused_step(
      embeddings,
      [&] {
        const auto x = tokens(torch::randint(9, {3, 3}, torch::kLong));
        return (x + positions(torch::arange(3))).square().mean();
      },
      "the layer of 'positions.weight' has looked up 3 indices, which may be samples or positions");
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
  refuses(NaturalGradientOptions().damping(0.0), "damping must be a finite number above 0, got 0");
  refuses(NaturalGradientOptions().update_freq(0), "update_freq must be at least 1, got 0");
  refuses(NaturalGradientOptions().eps(0.0), "eps must be a finite number above 0, got 0");
  refuses(NaturalGradientOptions().momentum(1.0), "momentum must be in [0, 1), got 1");
  refuses(NaturalGradientOptions().max_norm(-1.0), "max_norm");
  refuses(NaturalGradientOptions().solver("lu"),
          "solver must be one of 'auto', 'gram', 'cg', got 'lu'");
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

// ---- archives

TEST(NaturalGradientArchives, ThatDoNotFitLoadNothing) {
  const Problem problem = problems()[0];
  const auto options = NaturalGradientOptions(0.05).momentum(0.5).update_freq(3);
  auto model = make_mlp();
  NaturalGradient optimizer(*model, options);
  train(optimizer, problem, *model, 0, 2);
  const auto data = saved(optimizer);
  const auto refused = [&](nn::Sequential other_model) {
    other_model->to(torch::kDouble);
    NaturalGradient other(*other_model, options);
    train(other, problem, *other_model, 0, 1);
    return refusal_to_load(other, data);
  };
  expect_contains(refused(nn::Sequential(nn::Linear(5, 7), nn::Linear(7, 3))),
                  "has 6 parameters, but that of the optimizer has 4");
  expect_contains(refused(nn::Sequential(nn::Linear(5, 7), nn::Linear(7, 5), nn::Linear(5, 3))),
                  "momentum_buffer of '1.weight'");
  expect_foreign_archive_refused(optimizer);
}

TEST(NaturalGradientArchives, RestoreOptions) {
  expect_restored_options<NaturalGradient>(NaturalGradientOptions(0.5)
                                               .damping(0.2)
                                               .update_freq(3)
                                               .eps(1e-6)
                                               .momentum(0.8)
                                               .max_norm(2.0)
                                               .solver("cg")
                                               .maximize(true));
}

TEST(NaturalGradientArchives, HoldNoBatchThatIsNotNeeded) {
  const Problem problem = problems()[0];
  auto model = make_mlp();
  NaturalGradient optimizer(*model, NaturalGradientOptions().momentum(0.0));
  train(optimizer, problem, *model, 0, 2);
  for (const auto& param : model->parameters()) {
    ASSERT_EQ(state_tensors(optimizer, param).size(), 1U);  // the step count
  }
}

// ---- per-sample gradients

torch::OrderedDict<std::string, torch::Tensor> gradients_of(nn::Sequential model,
                                                            const torch::Tensor& inputs,
                                                            const torch::Tensor& targets) {
  return NaturalGradient::compute_per_sample_gradients(
      *model, [&](const torch::Tensor& x) { return model->forward(x); }, &cross_entropy, inputs,
      targets);
}

TEST(PerSampleGradients, ChangeNothing) {
  auto model = make_mlp();
  NaturalGradient watching(*model);
  const auto batch = make_batch(0, kMlpSample);
  cross_entropy(model->forward(batch.inputs), batch.targets).backward();
  Tensors before;
  for (const auto& param : model->parameters()) {
    before.push_back(param.grad().clone());
  }
  torch::manual_seed(9);
  gradients_of(model, batch.inputs, batch.targets);
  const auto drawn = torch::rand({3});
  torch::manual_seed(9);
  EXPECT_TRUE(torch::equal(drawn, torch::rand({3})));
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(torch::equal(model->parameters()[i].grad(), before[i]));
  }
  watching.step();
  EXPECT_EQ(watching.report().samples, 6);  // and other captures do not see it
}

TEST(PerSampleGradients, LeaveBuffersAlone) {
  struct Counting : public nn::Module {
    Counting() {
      linear = register_module("linear", nn::Linear(5, 3));
      calls = register_buffer("calls", torch::zeros({}));
    }
    torch::Tensor forward(const torch::Tensor& x) {
      calls.add_(1);
      return linear(x);
    }
    nn::Linear linear{nullptr};
    torch::Tensor calls;
  };
  Counting model;
  const auto batch = make_batch(0, kMlpSample, 6, torch::kFloat);
  const auto gradients = per_sample_gradients(
      model, [&](const torch::Tensor& x) { return model.forward(x); }, &cross_entropy, batch.inputs,
      batch.targets);
  EXPECT_EQ(gradients.keys(), (std::vector<std::string>{"linear.weight", "linear.bias"}));
  EXPECT_EQ(model.calls.item<float>(), 0.0F);
}

TEST(PerSampleGradients, LeaveOutFrozenParametersAndZeroUnusedOnes) {
  nn::Sequential model(nn::Linear(5, 4), nn::Linear(4, 3));
  model->parameters()[0].set_requires_grad(false);
  model->push_back("unused", nn::Linear(2, 2));
  const auto batch = make_batch(0, kMlpSample, 6, torch::kFloat);
  const auto gradients = per_sample_gradients(
      *model,
      [&](const torch::Tensor& x) {
        return model[1]->as<nn::Linear>()->forward(model[0]->as<nn::Linear>()->forward(x));
      },
      &cross_entropy, batch.inputs, batch.targets);
  EXPECT_EQ(gradients.keys(), (std::vector<std::string>{"0.bias", "1.weight", "1.bias",
                                                        "unused.weight", "unused.bias"}));
  EXPECT_EQ(gradients["unused.weight"].sizes(), (std::vector<int64_t>{6, 2, 2}));
  EXPECT_EQ(gradients["unused.weight"].abs().max().item<float>(), 0.0F);
  EXPECT_GT(gradients["0.bias"].abs().max().item<float>(), 0.0F);
}

TEST(PerSampleGradients, RefuseWhatHasNone) {
  const auto batch = make_batch(0, kMlpSample, 6, torch::kFloat);
  const auto refused = [&](nn::Sequential model) {
    return refusal([&] { gradients_of(model, batch.inputs, batch.targets); });
  };
  nn::Sequential plain(nn::Linear(5, 3));
  expect_contains(refused(nn::Sequential(nn::Linear(5, 3), nn::BatchNorm1d(3))),
                  "layer '1' (BatchNorm1d) normalises with the statistics of the batch");
  expect_contains(refused(nn::Sequential(nn::Linear(5, 3), nn::Dropout(0.5))),
                  "draws random numbers");
  expect_contains(
      refusal([&] { gradients_of(plain, batch.inputs, batch.targets.narrow(0, 0, 2)); }),
      "inputs hold 6 samples and targets 2");
  expect_contains(refusal([&] {
                    gradients_of(plain, batch.inputs.narrow(0, 0, 0),
                                 batch.targets.narrow(0, 0, 0));
                  }),
                  "at least one");
  const auto with_loss = [&](const LossFunction& loss) {
    per_sample_gradients(
        *plain, [&](const torch::Tensor& x) { return plain->forward(x); }, loss, batch.inputs,
        batch.targets);
  };
  expect_contains(refusal([&] { with_loss([](const auto& y, const auto&) { return y; }); }),
                  "loss_fn returned shape [1, 3]");
}

// ---- CUDA

TEST_P(Problems, FollowTheCpuOnCuda) {
  if (!torch::cuda::is_available()) {
    GTEST_SKIP() << "skipped: no CUDA device";
  }
  for (const auto* solver : {"gram", "cg"}) {
    const auto options =
        NaturalGradientOptions(0.1).damping(0.1).momentum(0.5).update_freq(2).solver(solver);
    const auto model = make();
    const auto cuda_model = make();
    cuda_model->to(torch::kCUDA);
    NaturalGradient optimizer(*model, options);
    NaturalGradient cuda_optimizer(*cuda_model, options);
    for (int step = 0; step < 5; ++step) {
      const auto batch = GetParam().batch(step, torch::kDouble);
      train_step(optimizer, GetParam(), *model, batch);
      train_step(cuda_optimizer, GetParam(), *cuda_model,
                 {batch.inputs.to(torch::kCUDA), batch.targets.to(torch::kCUDA)});
    }
    cuda_optimizer.check_errors();
    cuda_model->to(torch::kCPU);
    expect_close(*cuda_model, *model, 1e-6);
  }
}

}  // namespace
}  // namespace torchium::testing
