// KFAC with ekfac.
#include "kfac_testing.h"
#include "optim/kfac/kfac_direction.h"

namespace torchium::testing {
namespace {

KFACOptions ekfac(double lr = 0.05) {
  return KFACOptions(lr).TCov(2).TInv(3).damping_split("exact").ekfac(true);
}

// With one sample the eigenbasis has its gradient, and the second moments its squared norm.
TEST(Ekfac, EqualsTheDenseFisherOfOneSample) {
  const double damping = 1e-2;
  auto model = make_mlp();
  KFAC optimizer(*model, ekfac(0.0).TCov(1).damping(damping).momentum(0).kl_clip(std::nullopt));
  const auto batch = make_batch(0, kMlpSample, 1);
  train_on(optimizer, model, batch);  // a basis
  train_on(optimizer, model, batch);  // moments in it
  const auto before = copies(model->parameters());
  static_cast<KFACOptions&>(optimizer.param_groups()[0].options()).lr(1.0);
  train_on(optimizer, model, batch);
  const auto params = model->parameters();
  expect_step_of_dense_fisher(before, params, damping);
  for (size_t i = 0; i < params.size(); i += 2) {
    const auto& state = kfac_state(optimizer, params[i]);
    const auto squares = params[i].grad().square().sum() + params[i + 1].grad().square().sum();
    EXPECT_EQ(state.moment_updates().item<double>(), 2.0);
    EXPECT_NEAR(state.second_moments().sum().item<double>(), squares.item<double>(), 1e-8);
  }
}

TEST(Ekfac, ContinuesFromAnArchive) {
  for (int pause = 1; pause < 7; ++pause) {
    expect_archive_continues(ekfac(), pause, 8);
  }
}

// Layers of one shape are multiplied together.
TEST(KfacDirections, OfManyLayersAreThoseOfEach) {
  using namespace optim::detail;
  torch::manual_seed(0);
  const auto random = [](torch::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble); };
  std::vector<KfacLayer> layers;
  std::vector<LayerTensors> V;
  for (int k = 0; k < 9; ++k) {
    const int64_t groups = k % 3 == 2 ? 2 : 1;
    KfacLayer layer;
    layer.A_root = k % 3 == 1 ? random({groups, 10}) : random({groups, 10, 10});
    layer.G_root = random({groups, 4, 4});
    layer.A_eigenvalues = random({groups, 10}).abs();
    layer.G_eigenvalues = random({groups, 4}).abs();
    layer.second_moments = k < 6 ? random({groups, 4, 10}).abs() : torch::Tensor();
    layer.damping = k == 4 ? 0.5 : 0.1;
    layers.push_back(layer);
    V.push_back(
        {random({4 * groups, 1, 3, 3}), k % 2 == 0 ? random({4 * groups}) : torch::Tensor()});
  }
  std::vector<const KfacLayer*> all;
  for (const auto& layer : layers) {
    all.push_back(&layer);
  }
  for (const auto split : {DampingSplit::kPi, DampingSplit::kExact}) {
    const auto directions = kfac_directions(all, split, V);
    for (size_t k = 0; k < layers.size(); ++k) {
      SCOPED_TRACE(k);
      const auto expected = kfac_direction(layers[k], split, V[k]);
      ASSERT_EQ(directions[k].weight.sizes(), V[k].weight.sizes());
      expect_near(directions[k].weight, expected.weight, 1e-12);
      ASSERT_EQ(directions[k].bias.defined(), V[k].bias.defined());
      if (V[k].bias.defined()) {
        expect_near(directions[k].bias, expected.bias, 1e-12);
      }
    }
  }
}

TEST(Ekfac, NeedsEigenvectors) {
  auto model = make_mlp();
  const auto make = [&] { const KFAC optimizer(*model, KFACOptions().ekfac(true)); };
  expect_contains(message_of<c10::ValueError>(make),
                  "ekfac=True needs eigenvectors; use damping_split='exact', got 'pi'");
}

}  // namespace
}  // namespace torchium::testing
