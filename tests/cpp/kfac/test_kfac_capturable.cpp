// Steps of K-FAC and natural gradient that callers capture in CUDA graphs.
// test_capturable_curvature.py tests more options.
#include "kfac_testing.h"
#include "torchium/optim/natural_gradient.h"

#include <string>

#ifdef TORCHIUM_WITH_CUDA
#include "captured_graph.h"
#endif

namespace torchium::testing {
namespace {

using optim::NaturalGradient;
using optim::NaturalGradientOptions;

KFACOptions capturable_options() {
  return KFACOptions(0.05).capturable(true).damping_split("plain").damping(0.04).TCov(100).TInv(1);
}

torch::Tensor inverse_of(const torch::Tensor& A, double damping) {
  return torch::linalg_inv(A + std::sqrt(damping) * torch::eye(A.size(-1), A.options()));
}

TEST(KfacCapturable, OnlyUpdatePreconditionersInverts) {
  auto model = make_mlp();
  KFAC optimizer(*model, capturable_options());
  optimizer.update_preconditioners();  // there are no factors yet
  train(optimizer, model, kMlpSample, 0, 1);
  const KFACParamState& state = kfac_state(optimizer, model->parameters()[0]);
  const auto first = state.A_inverse().clone(), A = state.A().clone();
  expect_near(first, inverse_of(A, 0.04), 1e-9);
  train(optimizer, model, kMlpSample, 1, 4);
  EXPECT_TRUE(state.A_inverse().equal(first));
  EXPECT_FALSE(state.A().equal(A));
  static_cast<KFACOptions&>(optimizer.param_groups()[0].options()).damping(0.09);
  optimizer.update_preconditioners();
  expect_near(state.A_inverse(), inverse_of(state.A(), 0.09), 1e-9);
}

TEST(KfacCapturable, ExcludesOptions) {
  auto model = make_mlp();
  expect_contains(message_of<c10::ValueError>(
                      [&] { KFAC(*model, KFACOptions().capturable(true).solver("inverse_free")); }),
                  "use another solver");
  expect_contains(message_of<c10::ValueError>([&] {
                    KFAC(*model, KFACOptions().capturable(true).schedules(
                                     {{"damping", [](int64_t step) { return 1.0 / step; }}}));
                  }),
                  "is a function of the step");
  expect_contains(message_of<c10::ValueError>([&] {
                    NaturalGradient(*model,
                                    NaturalGradientOptions().capturable(true).update_freq(3));
                  }),
                  "use update_freq=1, got 3");
}

#ifdef TORCHIUM_WITH_CUDA
class CudaCapturable : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) {
      GTEST_SKIP() << "no CUDA device";
    }
  }
};

// Iterations of two models, launched and replayed, with learning rates that change in between.
template <typename Optimizer, typename Options>
void expect_replays_like_launches(const Options& options, bool renews) {
  auto plain = make_mlp(torch::kFloat), captured = make_mlp(torch::kFloat);
  plain->to(torch::kCUDA);
  captured->to(torch::kCUDA);
  Optimizer one(*plain, options), other(*captured, options);
  const Batch batch{torch::empty({6, 5}, torch::kCUDA),
                    torch::empty({6}, torch::TensorOptions(torch::kCUDA).dtype(torch::kLong))};
  const auto load = [&](int step) {
    const Batch next = make_batch(step, kMlpSample, 6, torch::kFloat);
    batch.inputs.copy_(next.inputs);
    batch.targets.copy_(next.targets);
  };
  for (int step = 0; step < 3; ++step) {
    load(step);
    train_on(one, plain, batch);
    train_on(other, captured, batch);
  }
  other.zero_grad();
  CapturedGraph graph([&] { train_on(other, captured, batch); });
  for (int step = 3; step < 9; ++step) {
    load(step);
    one.param_groups()[0].options().set_lr(0.1 / step);
    other.param_groups()[0].options().set_lr(0.1 / step);
    other.sync_lr();
    train_on(one, plain, batch);
    graph.replay();
    if constexpr (std::is_same_v<Optimizer, KFAC>) {
      if (renews && step % 2 == 0) {
        one.update_preconditioners();
        other.update_preconditioners();
      }
    }
  }
  one.check_errors();
  other.check_errors();
  expect_near_each(captured->parameters(), plain->parameters(), 1e-5);
}

TEST_F(CudaCapturable, ReplaysEqualLaunches) {
  expect_replays_like_launches<KFAC>(KFACOptions(0.05).capturable(true), true);
  expect_replays_like_launches<NaturalGradient>(NaturalGradientOptions(0.05).capturable(true),
                                                false);
}

TEST_F(CudaCapturable, RefusesWhatIsNew) {
  auto model = make_mlp(torch::kFloat);
  model->to(torch::kCUDA);
  for (const bool is_capturable : {false, true}) {
    KFAC optimizer(*model, KFACOptions(0.05).capturable(is_capturable));
    const Batch cpu = make_batch(0, kMlpSample, 6, torch::kFloat);
    const Batch batch{cpu.inputs.cuda(), cpu.targets.cuda()};
    cross_entropy(model->forward(batch.inputs), batch.targets).backward();
    if (!is_capturable) {
      optimizer.step();
    }
    optimizer.zero_grad();
    std::string refusal;
    const CapturedGraph graph(
        [&] { refusal = message_of<c10::Error>([&] { train_on(optimizer, model, batch); }); });
    expect_contains(refusal, "run a step before the capture");
  }
}
#endif

}  // namespace
}  // namespace torchium::testing
