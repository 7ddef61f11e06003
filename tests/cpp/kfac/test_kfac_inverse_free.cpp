// KFAC with solver "inverse_free".
#include "kfac_testing.h"

namespace torchium::testing {
namespace {

KFACOptions inverse_free(const std::string& K, const std::string& C) {
  return KFACOptions(0.05).TCov(2).solver("inverse_free").structures({K, C}).block_size(3);
}

// After one step with stat_decay 0 and without momenta, from K = I and C = I.
TEST(InverseFree, FirstStepEqualsTheFormula) {
  auto model = make_mlp();
  KFAC optimizer(*model, inverse_free("dense", "dense").TCov(1).stat_decay(0.9).alpha1(0.0));
  train(optimizer, model, kMlpSample, 0, 1);
  const auto& state = kfac_state(optimizer, model->parameters()[0]);
  EXPECT_FALSE(state.A().defined());
  EXPECT_FALSE(state.m_K().defined());
  // K = I - b m_K with m_K = (tr(G)/c A + damping I - I) / 2, so that A = a (2 (I - K) / b + ..I)
  const auto K = state.K()[0], C = state.C()[0];
  const auto eye_K = torch::eye(K.size(0), K.options());
  const auto eye_C = torch::eye(C.size(0), C.options());
  const auto H_K = 2 * (eye_K - K) / 0.1 + (1 - 0.01) * eye_K;  // tr(G)/c A
  const auto H_C = 2 * (eye_C - C) / 0.1 + (1 - 0.01) * eye_C;  // tr(A)/k G
  EXPECT_NEAR(H_K.diagonal().mean().item<double>(), H_C.diagonal().mean().item<double>(), 1e-10);
  EXPECT_GT(torch::linalg_eigvalsh(H_K).min().item<double>(), -1e-10);
  EXPECT_GT(torch::linalg_eigvalsh(H_C).min().item<double>(), -1e-10);
  EXPECT_GT(H_C.diagonal().mean().item<double>(), 1e-4);
}

TEST(InverseFree, ContinuesFromAnArchive) {
  for (const auto& [K, C] : {std::pair("dense", "toeplitz"), std::pair("block_diagonal", "dense"),
                             std::pair("toeplitz", "diagonal")}) {
    SCOPED_TRACE(K);
    for (int pause = 1; pause < 4; ++pause) {
      expect_archive_continues(inverse_free(K, C), pause, 6);
    }
  }
}

TEST(InverseFree, ReportsStructuresAndRefusesOptionsWithoutAMeaning) {
  auto model = make_mlp();
  KFAC optimizer(*model, inverse_free("block_diagonal", "toeplitz"));
  train(optimizer, model, kMlpSample, 0, 1);
  expect_contains(optimizer.report().parameters[0].detail, "blocks of 3 of A ");
  expect_contains(optimizer.report().parameters[0].detail, "Toeplitz G ");
  const auto make = [&] {
    const KFAC refused(*model, KFACOptions().solver("inverse_free").TInv(3));
  };
  expect_contains(message_of<c10::ValueError>(make), "TInv=3 has no meaning");
}

}  // namespace
}  // namespace torchium::testing
