// K-FAC as a preconditioner of libtorch's optimizers. test_kfac_preconditioner.py and
// test_parity_capturing.py compare more options.
#include "kfac_testing.h"
#include "torchium/optim/kfac_preconditioner.h"

#include <limits>

namespace torchium::testing {
namespace {

using optim::KFACPreconditioner;
using optim::KFACPreconditionerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;

KFACPreconditionerOptions preconditioner_options(const std::string& split) {
  return KFACPreconditionerOptions(0.05).factor_update_steps(2).inv_update_steps(3).damping_split(
      split);
}

void train_together(KFACPreconditioner& preconditioner, torch::optim::Optimizer& optimizer,
                    nn::Sequential& model, torch::IntArrayRef sample, int first, int last) {
  const auto dtype = model->parameters()[0].scalar_type();
  for (int step = first; step < last; ++step) {
    const auto batch = make_batch(step, sample, 6, dtype);
    optimizer.zero_grad();
    cross_entropy(model->forward(batch.inputs), batch.targets).backward();
    preconditioner.step();
    optimizer.step();
  }
}

TEST_P(Splits, PreconditionedSgdIsKfac) {
  const Warnings warnings;
  for (const auto& [make, sample] :
       {std::make_pair(&make_mlp, kMlpSample), std::make_pair(&make_convnet, kImageSample)}) {
    for (const double momentum : {0.0, 0.9}) {
      auto expected = make(torch::kDouble), actual = make(torch::kDouble);
      KFAC kfac(*expected,
                KFACOptions(0.05).TCov(2).TInv(3).damping_split(GetParam()).momentum(momentum));
      train(kfac, expected, sample, 0, 8);
      KFACPreconditioner preconditioner(*actual, preconditioner_options(GetParam()));
      SGD sgd(actual->parameters(), SGDOptions(0.05).momentum(momentum));
      train_together(preconditioner, sgd, actual, sample, 0, 8);
      expect_near_each(actual->parameters(), expected->parameters(), 1e-12);
      EXPECT_EQ(preconditioner.report().fallback, kfac.report().fallback);
    }
  }
}

TEST(KfacPreconditioner, ChangesOnlyTheGradientsOfLayers) {
  nn::Sequential model(nn::Linear(kMlpSample[0], 4), nn::PReLU(), nn::Linear(4, 3));
  KFACPreconditioner preconditioner(*model);
  const auto before = copies(model->parameters());
  auto batch = make_batch(0, kMlpSample);
  batch.inputs = batch.inputs.to(torch::kFloat);
  cross_entropy(model->forward(batch.inputs), batch.targets).backward();
  Tensors grads;
  for (const auto& param : model->parameters()) {
    grads.push_back(param.grad().clone());
  }
  const Warnings warnings;
  preconditioner.step();
  expect_contains(warnings.text, "KFACPreconditioner preconditions 4 of 5 parameters. It leaves");
  expect_equal(copies(model->parameters()), before);
  const auto names = model->named_parameters();
  for (size_t i = 0; i < grads.size(); ++i) {
    const bool falls_back = names[i].key() == "1.weight";
    EXPECT_EQ(torch::equal(names[i].value().grad(), grads[i]), falls_back) << names[i].key();
  }
}

TEST(KfacPreconditioner, ContinuesFromAnArchive) {
  for (int pause = 1; pause < 5; ++pause) {
    auto model = make_mlp(), resumed = make_mlp();
    KFACPreconditioner first(*model, preconditioner_options("pi")), second(*resumed);
    SGD sgd(model->parameters(), SGDOptions(0.05)), other(resumed->parameters(), SGDOptions(0.05));
    train_together(first, sgd, model, kMlpSample, 0, pause);
    copy_parameters(*model, *resumed);
    load(second, saved(first));
    train_together(first, sgd, model, kMlpSample, pause, 8);
    train_together(second, other, resumed, kMlpSample, pause, 8);
    expect_equal(copies(resumed->parameters()), copies(model->parameters()));
    expect_equal(all_state(second), all_state(first));
  }
}

TEST(KfacPreconditioner, RestoresItsOptions) {
  expect_restored_options<KFACPreconditioner>(KFACPreconditionerOptions(0.3)
                                                  .factor_update_steps(2)
                                                  .inv_update_steps(3)
                                                  .damping(0.4)
                                                  .factor_decay(0.5)
                                                  .kl_clip(std::nullopt)
                                                  .batch_averaged(false)
                                                  .eps(1e-3)
                                                  .damping_split("plain")
                                                  .solver("eigh")
                                                  .weight_sharing("reduce")
                                                  .max_factor_size(7));
  auto model = make_mlp();
  KFAC kfac(*model);
  KFACPreconditioner preconditioner(*model);
  expect_contains(refusal_to_load(preconditioner, saved(kfac)), "has the option '");
}

TEST(KfacPreconditioner, NamesWrongOptions) {
  auto model = make_mlp();
  const auto refused = [&](const KFACPreconditionerOptions& options) {
    return message_of<c10::ValueError>([&] { KFACPreconditioner(*model, options); });
  };
  expect_contains(refused(KFACPreconditionerOptions().factor_update_steps(0)),
                  "factor_update_steps must be an integer of at least 1, got 0");
  expect_contains(refused(KFACPreconditionerOptions().factor_decay(2.0)), "factor_decay must be");
  expect_contains(refused(KFACPreconditionerOptions().solver("newton").damping_split("exact")),
                  "solver='newton' has no eigenvectors");
  const std::vector<OptimizerParamGroup> foreign{
      OptimizerParamGroup(model->parameters(), std::make_unique<KFACOptions>())};
  expect_contains(message_of<c10::ValueError>([&] { KFACPreconditioner(*model, foreign); }),
                  "a parameter group of KFACPreconditioner needs KFACPreconditionerOptions");
}

TEST(KfacPreconditioner, LeavesGradientsThatAreNotFinite) {
  auto model = make_mlp();
  KFACPreconditioner preconditioner(*model);
  for (int attempt = 0; attempt < 3; ++attempt) {
    model->zero_grad();
    const auto batch = make_batch(attempt, kMlpSample);
    cross_entropy(model->forward(batch.inputs), batch.targets).backward();
    model->parameters()[0].mutable_grad()[0][0] = std::numeric_limits<double>::infinity();
    const auto last = model->parameters()[5].grad().clone();
    if (attempt < 2) {
      preconditioner.step();
    } else {
      expect_contains(message_of<c10::Error>([&] { preconditioner.step(); }),
                      "3 steps in a row had a gradient");
    }
    EXPECT_TRUE(torch::equal(model->parameters()[5].grad(), last));
  }
}

}  // namespace
}  // namespace torchium::testing
