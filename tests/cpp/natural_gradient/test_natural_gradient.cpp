// Natural gradient on stock torch::nn models. test_parity.py compares it with Python.
#include "natural_gradient_testing.h"

#include <cmath>

namespace torchium::testing {
namespace {

using torch::optim::OptimizerParamGroup;

// d <- mu d + (F + damping)^-1 (v - F mu d), by a dense solve.
class ReferenceNaturalGradient {
 public:
  ReferenceNaturalGradient(const Problem& problem, std::shared_ptr<nn::Module> model,
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

void expect_follows_the_formulas(const Problem& problem, const NaturalGradientOptions& options,
                                 double tolerance, int steps = 4) {
  const auto model = problem.make(torch::kDouble);
  const auto reference_model = problem.make(torch::kDouble);
  NaturalGradient optimizer(*model, options);
  ReferenceNaturalGradient reference(problem, reference_model, options);
  for (int step = 0; step < steps; ++step) {
    const auto batch = problem.batch(step, torch::kDouble);
    train_step(optimizer, problem, *model, batch);
    reference.step(batch);
  }
  expect_close(*model, *reference_model, tolerance);
}

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
    // In the space of samples, which is exact also if F is singular.
    const auto K = J.mm(J.t()) / J.size(0) + damping * torch::eye(J.size(0), J.options());
    const auto w = torch::linalg_solve(K, torch::full({J.size(0)}, 1.0 / J.size(0), J.options()));
    const auto expected = J.t().mv(w);
    EXPECT_LT((d - expected).norm().item<double>(), 1e-6 * expected.norm().item<double>());
  }
}

TEST_P(Problems, FollowTheFormulas) {
  const auto options = NaturalGradientOptions(0.1).damping(0.01);
  for (const auto* solver : {"gram", "explicit", "cg", "auto"}) {
    SCOPED_TRACE(solver);
    auto o = options;
    o.solver(solver).eps(1e-12);
    expect_follows_the_formulas(GetParam(), o, 1e-8);
    expect_follows_the_formulas(GetParam(), NaturalGradientOptions(o).momentum(0.9), 1e-8);
    expect_follows_the_formulas(GetParam(), NaturalGradientOptions(o).max_norm(0.5), 1e-8);
    expect_follows_the_formulas(GetParam(), NaturalGradientOptions(o).update_freq(3).momentum(0.5),
                                1e-8, 7);
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

TEST_P(Problems, FollowTheCpuOnCuda) {
  if (!torch::cuda::is_available()) {
    GTEST_SKIP() << "skipped: no CUDA device";
  }
  for (const auto* solver : {"gram", "explicit", "cg"}) {
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

TEST_P(Problems, ReplayLaunchedStepsOnCuda) {
  if (!torch::cuda::is_available()) {
    GTEST_SKIP() << "skipped: no CUDA device";
  }
  for (const auto* solver : {"gram", "explicit"}) {
    std::vector<torch::Tensor> results;
    for (const std::string graphs : {"always", "never"}) {
      const auto model = make();
      model->to(torch::kCUDA);
      NaturalGradient optimizer(
          *model,
          NaturalGradientOptions(0.1).damping(0.1).update_freq(3).solver(solver).graphs(graphs));
      for (int step = 0; step < 14; ++step) {
        if (step == 10) {
          EXPECT_EQ(optimizer.report().graph_bytes > 0, graphs == "always");
          optimizer.param_groups()[0].options().set_lr(0.05);
        }
        const auto batch = GetParam().batch(step, torch::kDouble);
        train_step(optimizer, GetParam(), *model,
                   {batch.inputs.to(torch::kCUDA), batch.targets.to(torch::kCUDA)});
      }
      optimizer.check_errors();
      results.push_back(flatten(model->parameters()));
    }
    EXPECT_TRUE(torch::equal(results[0], results[1]));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Problems, ::testing::ValuesIn(problems()),
                         [](const auto& info) { return info.param.name; });

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
  std::ostringstream tables;
  tables << NaturalGradient(*model).report() << "\n" << gram.report() << "\n" << cg.report();
  expect_contains(tables.str(),
                  "no step yet\nsolver   gram\nsamples  6\nrows     6\ngraphs   0 bytes\n");
  expect_contains(tables.str(), "\nrelative residual  ");
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

// Without momentum it is the first step of a new optimizer.
TEST(NaturalGradientTest, ANewFrequencyCountsFromTheNextBatchOn) {
  auto model = make_mlp();
  auto other = make_mlp();
  const Problem problem = problems()[0];
  const auto options = NaturalGradientOptions(0.05).damping(0.1).momentum(0.0);
  NaturalGradient optimizer(*model, NaturalGradientOptions(options).update_freq(3));
  train(optimizer, problem, *model, 0, 4);
  copy_parameters(*model, *other);
  options_of<NaturalGradientOptions>(optimizer).update_freq(1);
  train(optimizer, problem, *model, 4, 5);
  NaturalGradient fresh(*other, options);
  train(fresh, problem, *other, 4, 5);
  expect_equal(copies(model->parameters()), copies(other->parameters()));
}

TEST(NaturalGradientTest, LearnsFasterThanMomentum) {
  auto model = make_mlp();
  NaturalGradient natural(*model, NaturalGradientOptions(0.1).damping(0.01));
  expect_faster_than_momentum(natural, model, 0.5);
}

}  // namespace
}  // namespace torchium::testing
