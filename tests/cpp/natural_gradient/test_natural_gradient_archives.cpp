// Archives of natural gradient.
#include "natural_gradient_testing.h"

namespace torchium::testing {
namespace {

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
                  "'momentum_buffer' of '1.weight'");
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

}  // namespace
}  // namespace torchium::testing
