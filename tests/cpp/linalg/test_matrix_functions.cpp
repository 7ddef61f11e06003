#include "linalg/products/symmetric_update.h"
#include "linalg/roots/device_newton.h"
#include "linalg/roots/minimax.h"
#include <torchium/linalg/matrix_functions.h>

#include <torch/torch.h>

#include <cmath>
#include <gtest/gtest.h>
#include <vector>

namespace {

using torchium::linalg::detail::minimax_schedule;
using torchium::linalg::detail::symmetric_product_out;
using torchium::linalg::detail::symmetric_update_;

torch::Tensor positive_definite(int64_t batch, int64_t n, torch::ScalarType dtype) {
  torch::manual_seed(7);
  const auto X = torch::randn({batch, n, n}, torch::kDouble);
  return (X.matmul(X.mT()) / static_cast<double>(n) + 0.1 * torch::eye(n, torch::kDouble))
      .to(dtype);
}

double relative_error(const torch::Tensor& actual, const torch::Tensor& expected) {
  return ((actual.to(torch::kDouble) - expected).norm() / expected.norm()).item<double>();
}

bool is_symmetric(const torch::Tensor& A) { return torch::equal(A, A.mT()); }

TEST(SymmetricUpdate, AgreesWithAFullProductInEveryLayout) {
  // Orders below and above the limit of the tiled path, and tiles that do not divide them.
  for (const int64_t n : {1, 5, 64, 191, 192, 256, 300, 520}) {
    for (const int64_t k : {0, 1, 33}) {
      torch::manual_seed(1);
      const auto rows = torch::randn({3, n, k});
      const auto columns = rows.mT().contiguous().mT();
      const auto every_second = torch::randn({3, n, 2 * k}).slice(2, 0, 2 * k, 2);
      for (const auto& X : {rows, columns, every_second}) {
        auto C = positive_definite(3, n, torch::kFloat);
        C = (C + C.mT()) / 2;
        const auto X64 = X.to(torch::kDouble);
        const auto expected = 0.9 * C.to(torch::kDouble) + 0.2 * X64.matmul(X64.mT());
        symmetric_update_(C, X, 0.9, 0.2);
        EXPECT_LT(relative_error(C, expected), 1e-6) << "n = " << n << ", k = " << k;
        EXPECT_TRUE(is_symmetric(C));
      }
    }
  }
}

TEST(SymmetricUpdate, OverwritesWithBetaZero) {
  for (const int64_t n : {4, 260}) {
    auto C = torch::full({2, n, n}, NAN, torch::kDouble);
    const auto X = torch::ones({2, n, 3}, torch::kDouble);
    symmetric_update_(C, X, 0.0, 1.0);
    EXPECT_TRUE(torch::equal(C, torch::full({2, n, n}, 3.0, torch::kDouble)));
  }
}

TEST(SymmetricUpdate, WritesIntoAViewOfABatch) {
  auto batch = torch::zeros({4, 200, 200});
  auto C = batch.narrow(0, 1, 2);
  const auto X = torch::randn({2, 200, 8});
  symmetric_update_(C, X, 1.0, 1.0);
  EXPECT_TRUE(torch::allclose(batch.narrow(0, 1, 2), X.matmul(X.mT()), 1e-4, 1e-4));
  EXPECT_EQ(batch[0].abs().sum().item<float>() + batch[3].abs().sum().item<float>(), 0.0f);
}

TEST(SymmetricUpdate, GivesTheSameBitsEachRun) {
  const auto X = torch::randn({2, 512, 128});
  auto first = torch::zeros({2, 512, 512});
  symmetric_update_(first, X, 1.0, 1.0);
  for (int run = 0; run < 5; ++run) {
    auto again = torch::zeros({2, 512, 512});
    symmetric_update_(again, X, 1.0, 1.0);
    EXPECT_TRUE(torch::equal(first, again));
  }
}

TEST(SymmetricProduct, OfCommutingMatrices) {
  for (const int64_t n : {6, 300}) {
    const auto A = positive_definite(2, n, torch::kDouble);
    const auto square = A.matmul(A);
    auto C = torch::empty_like(A);
    symmetric_product_out(C, square, A);
    EXPECT_LT(relative_error(C, square.matmul(A)), 1e-14);
    EXPECT_TRUE(is_symmetric(C));
  }
}

// The scalar iteration maps every x of [lower, 1] to x^(-1/p).
TEST(Minimax, SchedulesConvergeOnTheWholeInterval) {
  for (const double unit : {std::ldexp(1.0, -24), std::ldexp(1.0, -53)}) {
    for (const int64_t p : {1, 2, 3, 4, 6, 8, 16, 100}) {
      for (const double lower : {0.5, 1e-2, 1e-5, unit * 16}) {
        const auto schedule = minimax_schedule(p, lower, unit);
        EXPECT_LE(schedule->size(), 24u);
        for (int i = 0; i <= 1000; ++i) {
          const double x = std::pow(lower, 1 - i / 1000.0);
          double root = 1, rest = x;
          for (const auto& q : *schedule) {
            const double factor = q.a + rest * (q.b + rest * q.c);
            root *= factor;
            rest *= std::pow(factor, static_cast<double>(p));
          }
          ASSERT_NEAR(root * std::pow(x, 1.0 / static_cast<double>(p)), 1.0, 4 * unit + 2e-15)
              << "p = " << p << ", lower = " << lower << ", x = " << x;
        }
      }
    }
  }
}

// Equioscillation: no quadratic is better than one whose error alternates on four points.
TEST(Minimax, FirstStepEquioscillates) {
  const double lower = 1e-4;
  const auto q = minimax_schedule(4, lower, std::ldexp(1.0, -53))->front();
  const auto error = [&](double x) { return 1 - std::pow(x, 0.25) * (q.a + x * (q.b + x * q.c)); };
  std::vector<double> extrema;
  double best = error(lower);
  for (int i = 1; i <= 200000; ++i) {
    const double e = error(std::pow(lower, 1 - i / 200000.0));
    if (e * best < 0) {
      extrema.push_back(best);
      best = e;
    } else if (std::abs(e) > std::abs(best)) {
      best = e;
    }
  }
  extrema.push_back(best);
  ASSERT_EQ(extrema.size(), 4u);
  for (const double e : extrema) {
    EXPECT_NEAR(std::abs(e), std::abs(extrema[0]), 1e-6);
  }
}

TEST(MatrixFunctions, InverseRootInEveryMethod) {
  const auto A = positive_definite(3, 20, torch::kDouble);
  for (const char* method : {"auto", "eigh", "newton"}) {
    const auto X = torchium::linalg::matrix_inverse_root(A, 4, {.eps = 0.5, .method = method});
    const auto damped = A + 0.5 * torch::eye(20, torch::kDouble);
    EXPECT_LT(relative_error(X.matmul(X).matmul(X).matmul(X).matmul(damped),
                             torch::eye(20, torch::kDouble).expand({3, 20, 20})),
              1e-12);
    EXPECT_TRUE(is_symmetric(X));
  }
}

TEST(MatrixFunctions, InfoHasOneEntryAMatrix) {
  const auto A = positive_definite(6, 5, torch::kFloat).view({2, 3, 5, 5});
  const auto info = torchium::linalg::matrix_inverse_root_info(A, 2, {.method = "newton"});
  EXPECT_EQ(info.root.sizes(), A.sizes());
  for (const auto& t : {info.residual, info.iterations, info.floor}) {
    EXPECT_EQ(t.sizes(), (std::vector<int64_t>{2, 3}));
  }
  EXPECT_TRUE((info.iterations > 0).all().item<bool>());
  EXPECT_TRUE((info.residual < 1e-3).all().item<bool>());
}

TEST(MatrixFunctions, ListsGiveEveryEntryWhatItHasAlone) {
  const std::vector<torch::Tensor> A{positive_definite(3, 6, torch::kDouble),
                                     positive_definite(2, 4, torch::kFloat),
                                     positive_definite(4, 6, torch::kDouble).view({2, 2, 6, 6})};
  const auto roots = torchium::linalg::matrix_inverse_root(A, 4, {.eps = 0.1});
  const auto infos = torchium::linalg::matrix_inverse_root_info(A, 4, {.eps = 0.1});
  const auto powers = torchium::linalg::matrix_power(A, -0.25, 0.1);
  const auto [values, vectors] = torchium::linalg::eigh(A);
  ASSERT_EQ(roots.size(), A.size());
  ASSERT_EQ(infos.size(), A.size());
  for (size_t i = 0; i < A.size(); ++i) {
    const double tolerance = A[i].scalar_type() == torch::kDouble ? 1e-13 : 1e-4;
    const auto alone = torchium::linalg::matrix_inverse_root(A[i], 4, {.eps = 0.1});
    EXPECT_EQ(roots[i].sizes(), A[i].sizes());
    EXPECT_EQ(roots[i].scalar_type(), A[i].scalar_type());
    for (const auto& X : {roots[i], infos[i].root, powers[i]}) {
      EXPECT_LT(relative_error(X, alone.to(torch::kDouble)), tolerance);
    }
    EXPECT_EQ(infos[i].residual.sizes(), A[i].sizes().slice(0, A[i].dim() - 2));
    const auto composed = (vectors[i] * values[i].unsqueeze(-2)).matmul(vectors[i].mT());
    EXPECT_LT(relative_error(composed, A[i].to(torch::kDouble)), tolerance);
  }
  EXPECT_THROW(torchium::linalg::matrix_inverse_root({torch::eye(2), torch::zeros(3)}, 2),
               c10::ValueError);
}

TEST(MatrixFunctions, PowerIsDifferentiable) {
  auto A = positive_definite(2, 4, torch::kDouble).requires_grad_();
  torchium::linalg::matrix_power(A, 2.0).sum().backward();
  // d sum(A A) / dA = 1 A^T + A^T 1, with 1 the matrix of ones.
  const auto ones = torch::ones_like(A);
  const auto expected = (ones.matmul(A.mT()) + A.mT().matmul(ones)).detach();
  EXPECT_LT(relative_error(A.grad(), expected), 1e-12);
}

TEST(MatrixFunctions, EighAgreesWithItsInput) {
  const auto A = positive_definite(5, 30, torch::kDouble);
  const auto [values, Q] = torchium::linalg::eigh(A);
  EXPECT_LT(relative_error((Q * values.unsqueeze(-2)).matmul(Q.mT()), A), 1e-13);
}

TEST(MatrixFunctions, WrongArgumentsRaiseValueError) {
  using torchium::linalg::matrix_inverse_root;
  EXPECT_THROW(matrix_inverse_root(torch::zeros({2, 3}), 2), c10::ValueError);
  EXPECT_THROW(matrix_inverse_root(torch::eye(2), 0), c10::ValueError);
  EXPECT_THROW(matrix_inverse_root(torch::eye(2), 2, {.eps = -1.0}), c10::ValueError);
  EXPECT_THROW(matrix_inverse_root(torch::eye(2), 2, {.method = "qr"}), c10::ValueError);
  EXPECT_THROW(torchium::linalg::matrix_power(torch::eye(2), NAN), c10::ValueError);
  EXPECT_THROW(torchium::linalg::eigh(torch::eye(2, torch::kInt)), c10::ValueError);
}

// More matrices of this order than the buffers of one pass hold.
TEST(DeviceInverse, EveryMatrixHasItsOwnDamping) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "skipped: no CUDA device";
  constexpr int64_t kMatrices = 35, kOrder = 1000;
  const auto A = torch::eye(kOrder, torch::kCUDA).expand({kMatrices, kOrder, kOrder}).contiguous();
  const auto dampings = torch::arange(1, kMatrices + 1, A.options().dtype(torch::kDouble));
  const auto inverse = torchium::linalg::detail::device_inverse(A, dampings, 0.0).root;
  const auto found = inverse.diagonal(0, 1, 2).select(1, 0).to(torch::kDouble);
  EXPECT_LT((found * (1 + dampings) - 1).abs().max().item<double>(), 1e-3);
}

}  // namespace
