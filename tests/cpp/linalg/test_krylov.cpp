// Eigenpairs and stochastic estimates of operators that are known by their products.
#include "cuda_kernels/common/philox.h"
#include <torchium/linalg.h>

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <limits>

namespace {

namespace linalg = torchium::linalg;

at::Tensor diagonal_matrix(int64_t n) {
  return torch::diag(torch::arange(1, n + 1, torch::kFloat64));
}

linalg::LinearOperator diagonal_operator(int64_t n) {
  const auto D = torch::arange(1, n + 1, torch::kFloat64).unsqueeze(1);
  return {n, [D](const at::Tensor& X) { return D * X; }, torch::kFloat64};
}

TEST(Philox, GivesTheKnownAnswersOfRandom123) {
  const auto expect = [](uint64_t seed, uint64_t stream, uint64_t counter,
                         const std::vector<uint32_t>& words) {
    const auto x = torchium::cuda_kernels::philox(seed, stream, counter);
    EXPECT_EQ(std::vector<uint32_t>(x.word, x.word + 4), words);
  };
  constexpr auto kOnes = std::numeric_limits<uint64_t>::max();
  expect(0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  expect(kOnes, kOnes, kOnes, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  expect(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88,
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(Krylov, LanczosFindsTheLargestEigenvalues) {
  const auto found = linalg::lanczos(diagonal_operator(300), 3);
  EXPECT_TRUE(
      torch::allclose(found.eigenvalues, torch::tensor({300.0, 299.0, 298.0}).to(torch::kDouble)));
  EXPECT_TRUE(found.converged.all().item<bool>());
  EXPECT_GT(found.products, 0);
  const auto X = found.eigenvectors;
  const auto residuals = (diagonal_matrix(300).matmul(X) - X * found.eigenvalues).norm(2, 0);
  EXPECT_LE(residuals.max().item<double>(), 1e-7);
}

TEST(Krylov, TakesAFunctionAndItsOrder) {
  const auto D = torch::arange(1, 301, torch::kFloat64).unsqueeze(1);
  const auto product = [D](const at::Tensor& X) { return D * X; };
  const auto found = linalg::lanczos({300, product, torch::kFloat64}, 1);
  EXPECT_NEAR(found.eigenvalues.item<double>(), 300, 1e-8);
  const auto general = linalg::arnoldi({300, product, torch::kFloat64}, 1);
  EXPECT_NEAR(torch::real(general.eigenvalues).item<double>(), 300, 1e-8);
}

TEST(Krylov, ArnoldiFindsAComplexPair) {
  auto A = diagonal_matrix(100) / 100;
  A[0][1] = 2;
  A[1][0] = -2;
  linalg::KrylovOptions options;
  options.which = "LI";
  const auto found = linalg::arnoldi(A, 2, options);
  const auto values = torch::linalg_eigvals(A);
  const auto largest = torch::imag(values).abs().max().item<double>();
  EXPECT_NEAR(torch::imag(found.eigenvalues).abs().max().item<double>(), largest, 1e-9);
}

TEST(Krylov, RefusesWrongArguments) {
  const auto A = diagonal_matrix(50);
  linalg::KrylovOptions options;
  options.which = "LR";
  EXPECT_THROW(linalg::lanczos(A, 3, options), c10::ValueError);
  EXPECT_THROW(linalg::lanczos(A, 51), c10::ValueError);
  EXPECT_THROW(linalg::LinearOperator(torch::zeros({3, 4})), c10::ValueError);
  EXPECT_THROW(linalg::LinearOperator(A.to(torch::kHalf)), c10::ValueError);
  EXPECT_THROW(linalg::LinearOperator(3, nullptr), c10::ValueError);
  const linalg::LinearOperator wrong(50, [](const at::Tensor& X) { return X.mT(); });
  EXPECT_THROW(linalg::lanczos(wrong, 3), c10::ValueError);
}

TEST(Estimators, FindTraceDiagonalAndDeterminant) {
  const auto A = diagonal_operator(40);
  EXPECT_NEAR(linalg::hutchinson_trace(A).value.item<double>(), 820, 1e-9);
  EXPECT_TRUE(
      torch::allclose(linalg::hutchinson_diagonal(A).value, diagonal_matrix(40).diagonal()));
  EXPECT_NEAR(linalg::hutchpp(A, 120).value.item<double>(), 820, 1e-8);  // the sketch spans all
  const auto diagonal = linalg::xdiag(A, 20);
  const auto error = (diagonal.value - diagonal_matrix(40).diagonal()).norm();
  EXPECT_LE(error.item<double>(), 3 * diagonal.standard_error.norm().item<double>());
  linalg::LogdetOptions options;
  options.num_steps = 40;
  EXPECT_NEAR(linalg::logdet(A, options).value.item<double>(), std::lgamma(41.0), 1e-5);
}

TEST(Krylov, TakesAllOfASmallMatrixByDefault) {
  const auto A = diagonal_matrix(3);
  EXPECT_EQ(linalg::lanczos(A).eigenvalues.size(0), 3);
  EXPECT_EQ(linalg::arnoldi(A).eigenvalues.size(0), 3);
  EXPECT_EQ(linalg::lanczos(diagonal_matrix(7)).eigenvalues.size(0), 6);
  EXPECT_THROW(linalg::lanczos(A, 6), c10::ValueError);
  EXPECT_EQ(linalg::xdiag(A).products, 3);
  EXPECT_EQ(linalg::xdiag(diagonal_matrix(60)).products, 60);
  EXPECT_THROW(linalg::xdiag(A, 100), c10::ValueError);
}

TEST(Hessian, MultipliesAsTheSecondDerivative) {
  const auto p = torch::ones({3}, torch::kFloat64).requires_grad_();
  const auto q = torch::ones({2}, torch::kFloat64).requires_grad_();
  const auto H = linalg::hvp_operator([&] { return p.pow(3).sum(); }, {p, q});
  EXPECT_EQ(H.size(), 5);
  const auto expected = torch::diag(torch::tensor({6.0, 6.0, 6.0, 0.0, 0.0}).to(torch::kDouble));
  EXPECT_TRUE(torch::allclose(H.matmul(torch::eye(5, torch::kFloat64)), expected));
  EXPECT_THROW(linalg::hvp_operator([&] { return p; }, {p}), c10::ValueError);
  EXPECT_THROW(linalg::hvp_operator([&] { return p.sum(); }, {}), c10::ValueError);
  EXPECT_THROW(linalg::hvp_operator([&] { return p.sum(); }, {p, p}), c10::ValueError);
  EXPECT_THROW(linalg::hvp_operator([&] { return p.sum(); }, {q}), c10::ValueError);
  EXPECT_THROW(linalg::hvp_operator([&] { return p.sum(); }, {p, q.detach()}), c10::ValueError);
}

TEST(Fisher, MultipliesAsItsDefinition) {
  torch::manual_seed(0);
  const auto W = torch::randn({3, 4}, torch::kFloat64).requires_grad_();
  const auto x = torch::randn({5, 4}, torch::kFloat64);
  const auto losses = [&] {
    const auto z = x.matmul(W.mT());
    return linalg::SampleLosses{z.square().sum(1) / 2, z};
  };
  // J_n = I (x) x_n, and the gradient is z_n (x) x_n.
  const auto z = x.matmul(W.mT()).detach();
  const auto gradients = (z.unsqueeze(2) * x.unsqueeze(1)).flatten(1);
  const auto I = torch::eye(12, torch::kFloat64);
  const auto empirical = linalg::fisher_operator(losses, {W});
  EXPECT_EQ(empirical.size(), 12);
  EXPECT_TRUE(torch::allclose(empirical.matmul(I), gradients.mT().matmul(gradients) / 5));
  const auto ggn = linalg::fisher_operator(losses, {W}, "ggn");
  const auto expected = torch::kron(torch::eye(3, torch::kFloat64), x.mT().matmul(x) / 5);
  EXPECT_TRUE(torch::allclose(ggn.matmul(I), expected));

  const auto refuses = [&](const linalg::SampleLosses& found, const std::string& fisher) {
    EXPECT_THROW(linalg::fisher_operator([&] { return found; }, {W}, fisher), c10::ValueError);
  };
  const auto [l, outputs] = losses();
  refuses({l, outputs}, "mc");
  refuses({l.mean(), outputs}, "empirical");
  refuses({l, {}}, "ggn");
  refuses({l, outputs.narrow(0, 0, 2)}, "ggn");
  refuses({l.detach(), {}}, "empirical");
  refuses({l, losses().outputs}, "ggn");
  EXPECT_THROW(linalg::fisher_operator(losses, {}), c10::ValueError);
}

}  // namespace
