// K-FAC on stock torch::nn models: the formulas, schedules, groups, dtypes. test_parity.py compares
// it with the Python optimizer.
#include "kfac_testing.h"

#include <cmath>
#include <map>

namespace torchium::testing {
namespace {

using torch::optim::OptimizerParamGroup;

// ---- the mathematics

torch::Tensor with_ones(const torch::Tensor& a) {
  return torch::cat({a, torch::ones({a.size(0), 1}, a.options())}, 1);
}

// K-FAC of make_mlp(), written directly from the formulas.
class ReferenceKfac {
 public:
  ReferenceKfac(nn::Sequential model, KFACOptions options)
      : model_(model), o_(std::move(options)) {}

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
    ReferenceKfac reference(reference_model, options);
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
    expect_step_of_dense_fisher(before, model->parameters(), damping);
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

// ---- schedules, groups, dtypes, devices

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
  EXPECT_EQ(optimizer.report().parameters[0].treatment, "diagonal");
  EXPECT_EQ(optimizer.report().parameters[0].detail, "the diagonal of A 600001, G 2");
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
