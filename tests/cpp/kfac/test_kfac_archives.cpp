// Archives of K-FAC.
#include "kfac_testing.h"

#include <sstream>

namespace torchium::testing {
namespace {

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

TEST(KfacArchives, WarnOfGradientsWithoutCalls) {
  auto model = make_mlp();
  auto optimizer = make_kfac(model, "pi");
  train(optimizer, model, kMlpSample, 0, 2);
  const auto data = saved(optimizer);
  {
    const Warnings warnings;
    load(optimizer, data);
    EXPECT_EQ(warnings.text.find("between backward()"), std::string::npos) << warnings.text;
  }
  model->forward(torch::randn({4, 5}, torch::kDouble)).sum().backward();
  const Warnings warnings;
  load(optimizer, data);
  EXPECT_NE(warnings.text.find("between backward()"), std::string::npos) << warnings.text;
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
  expect_contains(refused(wider), "'momentum_buffer' of '2.weight', parameter 2 of group 0");
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

}  // namespace
}  // namespace torchium::testing
