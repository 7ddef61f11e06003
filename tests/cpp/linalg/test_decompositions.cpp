#include "linalg/decompositions/polar_iteration.h"
#include "linalg/decompositions/svd.h"
#include <torchium/linalg.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

namespace {

namespace linalg = torchium::linalg;

void expect_equal_up_to(const at::Tensor& found, const at::Tensor& expected,
                        double tolerance = 1e-12) {
  EXPECT_TRUE(at::allclose(found.to(expected), expected, tolerance, tolerance))
      << found << expected;
}

// Orthonormal columns times `values` times orthonormal rows, [m, n] float64.
at::Tensor with_singular_values(const at::Tensor& values, int64_t m, int64_t n) {
  const int64_t k = values.size(0);
  const auto left = std::get<0>(at::linalg_qr(torch::randn({m, k}, torch::kFloat64)));
  const auto right = std::get<0>(at::linalg_qr(torch::randn({n, k}, torch::kFloat64)));
  return at::matmul(left * values, right.mT());
}

at::Tensor polar_factor(const at::Tensor& A) {
  const auto [U, S, Vh] = at::linalg_svd(A, /*full_matrices=*/false);
  return at::matmul(U, Vh);
}

TEST(Decompositions, CholeskyReportsItsJitter) {
  const auto A = torch::stack({torch::eye(3), torch::zeros({3, 3}), -torch::eye(3)});
  const auto [L, jitter] = linalg::cholesky(A, 3.0);
  expect_equal_up_to(L[0], 2 * torch::eye(3), 1e-6);
  expect_equal_up_to(jitter, torch::zeros({3}, torch::kFloat64));
  const auto factor = linalg::cholesky(A);
  EXPECT_GT(factor.jitter[1].item<double>(), 0);
  EXPECT_TRUE(factor.L[2].isnan().all().item<bool>());
  EXPECT_NEAR(linalg::spd_logdet(A[0], 3.0).item<double>(), 3 * std::log(4.0), 1e-5);
  EXPECT_THROW(linalg::cholesky(torch::ones({2, 3})), c10::ValueError);
}

TEST(Decompositions, PolarFactors) {
  const auto A = torch::tensor({{0.0, 2.0}, {-3.0, 0.0}}, torch::kFloat64);
  const auto [U, H] = linalg::polar(A);
  expect_equal_up_to(U, torch::tensor({{0.0, 1.0}, {-1.0, 0.0}}, torch::kFloat64));
  expect_equal_up_to(H, torch::tensor({{3.0, 0.0}, {0.0, 2.0}}, torch::kFloat64));
  expect_equal_up_to(linalg::orthogonalize(A, 1e-6), U);
  EXPECT_THROW(linalg::orthogonalize(A, 2.0), c10::ValueError);
}

// By the algorithm of GPUs, on a CPU.
TEST(Decompositions, ThePolarIterationRaisesSingularValuesAboveRcondToOne) {
  torch::manual_seed(0);
  for (const double rcond : {0.1, 1e-3, 1.2e-7, 1e-13}) {
    const auto values = torch::logspace(0, std::log10(rcond), 30, 10, torch::kFloat64);
    const auto A = torch::stack(
        {with_singular_values(values, 50, 30), 1e6 * with_singular_values(values, 50, 30)});
    const auto U = linalg::detail::polar_iteration(A, rcond);
    expect_equal_up_to(at::matmul(U.mT(), U), torch::eye(30, torch::kFloat64).expand({2, 30, 30}));
    // |U - exact| is up to a rounding error of A divided by the smallest singular values.
    expect_equal_up_to(U, polar_factor(A), 1e-14 / rcond);
    const auto H = at::matmul(U.mT(), A[0]);
    expect_equal_up_to(at::matmul(U, (H + H.mT()) / 2)[0], A[0], 1e-10);
  }
  const auto small = with_singular_values(torch::logspace(0, -8, 9, 10, torch::kFloat64), 9, 9);
  const auto singular = torch::stack({small, torch::zeros({9, 9}, torch::kFloat64)});
  const auto U = linalg::detail::polar_iteration(singular, 1e-3);
  EXPECT_LE(at::linalg_svdvals(U).max().item<double>(), 1 + 1e-12);
  expect_equal_up_to(at::linalg_svdvals(U[0]).narrow(0, 0, 4), torch::ones({4}, torch::kFloat64));
  EXPECT_EQ(U[1].abs().max().item<double>(), 0);
}

TEST(Decompositions, TheSvdByPolarFactorsIsAsAccurateAsFloat) {
  torch::manual_seed(0);
  const auto full = torch::linspace(1, 3, 40, torch::kFloat64);
  const auto half =
      at::cat({torch::ones({20}, torch::kFloat64), torch::zeros({20}, torch::kFloat64)});
  const auto decaying = torch::logspace(0, -12, 40, 10, torch::kFloat64);
  const auto identity = torch::eye(40);
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>{60, 40}, {40, 60}, {40, 40}}) {
    const auto A =
        torch::stack({with_singular_values(full, m, n), with_singular_values(half, m, n),
                      with_singular_values(decaying, m, n), torch::zeros({m, n}, torch::kFloat64)})
            .to(torch::kFloat);
    const auto [U, S, Vh] = linalg::detail::svd_by_polar(A);
    for (int64_t i = 0; i < A.size(0); ++i) {
      expect_equal_up_to(at::matmul(U[i].mT(), U[i]), identity, 5e-6);
      expect_equal_up_to(at::matmul(Vh[i], Vh[i].mT()), identity, 5e-6);
      expect_equal_up_to(at::matmul(U[i] * S[i], Vh[i]), A[i], 5e-6);
      expect_equal_up_to(S[i], at::linalg_svdvals(A[i].to(torch::kFloat64)).to(torch::kFloat),
                         3e-6);
    }
  }
}

}  // namespace
