// The damping of K-FAC by the rule of Levenberg and Marquardt.
// test_adaptive_damping.py compares the ratio with the quadratic model.
#include "kfac_testing.h"
#include "torchium/optim/kfac_preconditioner.h"

#include <cmath>
#include <limits>

namespace torchium::testing {
namespace {

KFACOptions adaptive_options() {
  return KFACOptions(0.5).momentum(0.0).TCov(1).TInv(1).adaptive_damping(true);
}

double damping_of(KFAC& optimizer) {
  return static_cast<KFACOptions&>(optimizer.param_groups()[0].options()).damping();
}

TEST(KfacAdaptiveDamping, FollowsTheRatio) {
  for (const auto& [part, power] :
       {std::pair(0.8, 1), std::pair(0.5, 0), std::pair(0.2, -1), std::pair(-3.0, -1)}) {
    auto model = make_mlp(), twin = make_mlp();
    KFAC optimizer(*model, adaptive_options()), other(*twin, adaptive_options());
    train(optimizer, model, kMlpSample, 0, 3);
    train(other, twin, kMlpSample, 0, 3);
    const double predicted = 1.0 / other.update_damping(1.0, 0.0);
    EXPECT_GT(predicted, 0.0);
    EXPECT_NEAR(optimizer.update_damping(1.0, 1.0 - part * predicted), part, 1e-9);
    EXPECT_NEAR(damping_of(optimizer), 0.01 * std::pow(0.95, 3 * power), 1e-12);
    train(optimizer, model, kMlpSample, 3, 4);
    const double infinity = std::numeric_limits<double>::infinity();
    EXPECT_EQ(optimizer.update_damping(1.0, infinity), -infinity);
    EXPECT_NEAR(damping_of(optimizer), 0.01 * std::pow(0.95, 3 * power - 1), 1e-12);
  }
}

TEST(KfacAdaptiveDamping, LowersADampingThatIsTooLarge) {
  auto model = make_mlp();
  KFAC optimizer(*model, adaptive_options().lr(1.0).damping(100.0).kl_clip(std::nullopt));
  const auto batch = make_batch(0, kMlpSample);
  const auto loss = [&] { return cross_entropy(model->forward(batch.inputs), batch.targets); };
  for (int step = 0; step < 50; ++step) {
    optimizer.zero_grad();
    const auto before = loss();
    before.backward();
    optimizer.step();
    optimizer.update_damping(before.item<double>(), loss().item<double>());
  }
  EXPECT_LT(damping_of(optimizer), 10.0);
}

TEST(KfacAdaptiveDamping, RefusesMisuse) {
  const auto refused = [](KFAC& optimizer, double before = 1.0) {
    return message_of<c10::ValueError>([&] { optimizer.update_damping(before, 0.5); });
  };
  auto model = make_mlp();
  expect_contains(
      message_of<c10::ValueError>([&] { KFAC(*model, KFACOptions().adaptive_damping(true)); }),
      "use momentum=0, got 0.9");
  KFAC optimizer(*model, adaptive_options());
  expect_contains(refused(optimizer), "call it once after step()");
  train(optimizer, model, kMlpSample, 0, 1);
  expect_contains(refused(optimizer, std::nan("")), "loss_before must be finite");
  optimizer.update_damping(1.0, 0.5);
  expect_contains(refused(optimizer), "call it once after step()");
  KFAC off(*model);
  train(off, model, kMlpSample, 0, 1);
  expect_contains(refused(off), "update_damping() needs adaptive_damping=True");
  const auto scheduled = adaptive_options().schedules({{"damping", [](int64_t) { return 0.1; }}});
  expect_contains(
      message_of<c10::ValueError>([&] { KFAC(*model, scheduled); }),
      "damping of group 0 is a function of the step, which adaptive_damping=True cannot "
      "change; pass a number to start from, or adaptive_damping=False");
  optim::KFACPreconditioner preconditioner(*model);
  expect_contains(refused(preconditioner), "does not take the step of the parameters");
}

}  // namespace
}  // namespace torchium::testing
