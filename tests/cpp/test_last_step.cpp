// The schedules of the float32 iteration for inverse roots: quadratic steps, then one of degree 6
// in fp16 products.
#include "linalg/minimax.h"
#include "linalg/root_ladder.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <utility>
#include <vector>

namespace {

using torchium::cuda_kernels::RootLadder;
using torchium::linalg::detail::last_step_schedule;
using torchium::linalg::detail::minimax_schedule;
using torchium::linalg::detail::root_ladder;

const double kUnit = std::ldexp(1.0, -24);
const std::vector<int64_t> kRoots{1, 2, 3, 4, 6, 8, 16, 1000};

// 1 + W(x) in the form of the header comment. Step: LastStep of either kind.
template <typename T, typename Step>
T last_factor(const Step& s, T x) {
  const T z = x - T(s.center);
  const T square = z * z;
  const T v = z * square + T(s.f) * square + T(s.g) * z;
  return 1 + T(s.a) + T(s.b) * z + T(s.c) * square + T(s.d) * v + T(s.e) * v * v;
}

// Takes x through the quadratic steps: what is left of it, and the root so far.
template <typename Steps>
std::pair<double, double> through(const Steps& steps, double x, int64_t p) {
  double root = 1;
  for (const auto& q : steps) {
    const double factor = q.a + x * (q.b + x * q.c);
    root *= factor;
    x *= std::pow(factor, static_cast<double>(p));
  }
  return {x, root};
}

TEST(LastStep, IsAsAccurateAsItSaysOnTheWholeInterval) {
  for (const int64_t p : kRoots) {
    const double power = 1.0 / static_cast<double>(p);
    for (int rung = -22; rung <= 0; ++rung) {
      const double lower = std::exp2(rung);
      const auto schedule = last_step_schedule(p, lower, kUnit);
      EXPECT_LE(schedule->error, 3e-5);
      EXPECT_LE(schedule->steps.size(), minimax_schedule(p, lower, kUnit)->size());
      for (int i = 0; i <= 500; ++i) {
        const double x = std::pow(lower, 1 - i / 500.0);
        const auto [rest, root] = through(schedule->steps, x, p);
        const double exact = root * last_factor(schedule->last, rest) * std::pow(x, power);
        ASSERT_NEAR(exact, 1, schedule->error + 1e-12) << p << " " << lower << " " << x;
        const auto in_float = last_factor(schedule->last, static_cast<float>(rest));
        ASSERT_NEAR(root * in_float * std::pow(x, power), 1, schedule->error + 1e-6)
            << p << " " << lower << " " << x;
      }
    }
  }
}

// No polynomial of degree 6 can do better than one whose error alternates on eight points.
TEST(LastStep, Equioscillates) {
  for (const auto& [p, lower] : {std::pair<int64_t, double>{4, 0.8}, {16, 0.5}, {1000, 0.25}}) {
    const double power = 1.0 / static_cast<double>(p);
    const auto schedule = last_step_schedule(p, lower, kUnit);
    ASSERT_TRUE(schedule->steps.empty());
    std::vector<double> extrema{0};
    for (int i = 0; i <= 100000; ++i) {
      const double x = lower + (1 - lower) * i / 100000.0;
      const double e = 1 - std::pow(x, power) * last_factor(schedule->last, x);
      if (e * extrema.back() < 0) {
        extrema.push_back(e);
      } else if (std::abs(e) > std::abs(extrema.back())) {
        extrema.back() = e;
      }
    }
    ASSERT_EQ(extrema.size(), 8u) << p;
    for (const double e : extrema) {
      EXPECT_NEAR(std::abs(e), schedule->error, 1e-2 * schedule->error);
    }
  }
}

TEST(LastStep, ReplacesTwoQuadraticStepsAtTheFloor) {
  const double floor = std::exp2(-18);
  EXPECT_EQ(minimax_schedule(4, floor, kUnit)->size(), 6u);
  EXPECT_EQ(last_step_schedule(4, floor, kUnit)->steps.size(), 4u);
  EXPECT_EQ(last_step_schedule(4, 1, kUnit)->steps.size(), 0u);
}

TEST(LastStep, LaddersHoldTheSchedulesInFloat) {
  for (const int64_t lowest_rung : {-18, -20, -22}) {
    for (const int64_t p : {int64_t{1}, int64_t{4}, int64_t{16}, int64_t{1} << 20}) {
      const RootLadder* ladder = root_ladder(p, lowest_rung);
      ASSERT_NE(ladder, nullptr);
      EXPECT_EQ(ladder, root_ladder(p, lowest_rung));
      ASSERT_EQ(ladder->lowest_rung, lowest_rung);
      ASSERT_EQ(ladder->rungs, 1 - lowest_rung);
      EXPECT_EQ(ladder->steps, *std::max_element(ladder->lengths, ladder->lengths + ladder->rungs));
      for (int rung = 0; rung < ladder->rungs; ++rung) {
        const double lower = std::exp2(lowest_rung + rung);
        const auto schedule = last_step_schedule(p, lower, kUnit);
        ASSERT_EQ(ladder->lengths[rung], static_cast<int>(schedule->steps.size()));
        const float* q = ladder->coefficients + ptrdiff_t{3} * rung * ladder->steps;
        for (const auto& step : schedule->steps) {
          EXPECT_FLOAT_EQ(q[0], static_cast<float>(step.a));
          EXPECT_FLOAT_EQ(q[1], static_cast<float>(step.b));
          EXPECT_FLOAT_EQ(q[2], static_cast<float>(step.c));
          q += 3;
        }
        for (const double x : {0.9, 1.0, 1.1}) {
          EXPECT_NEAR(last_factor(ladder->last[rung], static_cast<float>(x)),
                      last_factor(schedule->last, x), 1e-6);
        }
      }
    }
  }
}

torch::Tensor rounded(const torch::Tensor& A) { return A.to(torch::kHalf).to(A.scalar_type()); }
torch::Tensor half_product(const torch::Tensor& A, const torch::Tensor& B) {
  return rounded(A).matmul(rounded(B));
}

// The whole iteration in the precision of M, the last step with operands rounded to fp16.
torch::Tensor inverse_root(torch::Tensor M, int64_t p, int rung) {
  const auto schedule = last_step_schedule(p, std::exp2(rung), kUnit);
  const auto I = torch::eye(M.size(0), M.options());
  auto X = I;
  for (const auto& step : schedule->steps) {
    const auto q = step.a * I + step.b * M + step.c * M.matmul(M);
    X = X.matmul(q);
    for (int64_t i = 0; i < p; ++i) {
      M = M.matmul(q);
    }
  }
  const auto& s = schedule->last;
  const auto Z = M - s.center * I;
  const auto S = rounded(half_product(Z, Z));
  const auto V = rounded(half_product(Z, S) + s.f * S + s.g * Z);
  const auto W = s.a * I + s.b * Z + s.c * S + s.d * V + s.e * half_product(V, V);
  return X + half_product(X, W);
}

torch::Tensor random_basis(int64_t n) {
  torch::manual_seed(3);
  return std::get<0>(torch::linalg_qr(torch::randn({n, n}, torch::kDouble)));
}

TEST(LastStep, RoundingToHalvesIsWithinTheTolerance) {
  const int64_t n = 48;
  const auto Q = random_basis(n);
  for (const int64_t p : {1, 2, 3, 4, 6, 8}) {
    for (const int rung : {-12, -10, -7, -4, -1}) {
      const auto spectrum = torch::exp2(torch::linspace(rung, 0, n, torch::kDouble));
      const auto M = (Q * spectrum).matmul(Q.t());
      const auto root = (Q * spectrum.pow(-1.0 / static_cast<double>(p))).matmul(Q.t());
      const auto X = inverse_root(M.to(torch::kFloat), p, rung).to(torch::kDouble);
      const double own = std::exp2(-23 - 0.5 * rung);  // of the steps before the last one
      EXPECT_LT(((X - root).norm() / root.norm()).item<double>(), 2 * (own + 3e-5))
          << "p = " << p << ", rung = " << rung;
    }
  }
}

// The largest entries of X must not drown the directions of the largest eigenvalues.
TEST(LastStep, RoundingToHalvesKeepsTheResidualSmall) {
  const int64_t n = 48;
  const auto Q = random_basis(n);
  const auto M = (Q * torch::exp2(torch::linspace(-18, 0, n, torch::kDouble))).matmul(Q.t());
  for (const int64_t p : {1, 2, 3, 4, 6, 8}) {
    const auto X = inverse_root(M, p, -18);
    const auto residual = M.matmul(torch::matrix_power(X, p)).matmul(M) - M;
    EXPECT_LT((residual.norm() / M.norm()).item<double>(), 0.1) << "p = " << p;
  }
}

}  // namespace
