// The schedules of the float32 iteration for inverse roots: quadratic steps, then one of degree 6
// in fp16 products.
#include "linalg/roots/minimax.h"
#include "linalg/roots/root_schedule_table.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <utility>
#include <vector>

namespace {

using torchium::cuda_kernels::RootScheduleTable;
using torchium::linalg::detail::last_step_schedule;
using torchium::linalg::detail::minimax_schedule;
using torchium::linalg::detail::root_schedule_table;

const double kUnit = std::ldexp(1.0, -24);
const std::vector<int64_t> kRoots{1, 2, 3, 4, 6, 8, 16, 1000};

// 1 + W(x) in the form of the header comment. Step: either type of LastStep.
template <typename T, typename Step>
T last_factor(const Step& s, T x) {
  const T z = x - T(s.center);
  const T square = z * z;
  const T v = z * square + T(s.f) * square + T(s.g) * z;
  return 1 + T(s.a) + T(s.b) * z + T(s.c) * square + T(s.d) * v + T(s.e) * v * v;
}

// Applies the quadratic steps to x: returns the remaining value and the root so far.
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
    for (int level = -22; level <= 0; ++level) {
      const double lower = std::exp2(level);
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

// No polynomial of degree 6 is better than one whose error alternates on eight points.
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

TEST(LastStep, TablesHoldTheSchedulesInFloat) {
  for (const int64_t lowest_level : {-18, -20, -22}) {
    for (const int64_t p : {int64_t{1}, int64_t{4}, int64_t{16}, int64_t{1} << 20}) {
      const RootScheduleTable* schedules = root_schedule_table(p, lowest_level);
      ASSERT_NE(schedules, nullptr);
      EXPECT_EQ(schedules, root_schedule_table(p, lowest_level));
      ASSERT_EQ(schedules->lowest_level, lowest_level);
      ASSERT_EQ(schedules->levels, 1 - lowest_level);
      EXPECT_EQ(schedules->steps,
                *std::max_element(schedules->lengths, schedules->lengths + schedules->levels));
      for (int level = 0; level < schedules->levels; ++level) {
        const double lower = std::exp2(lowest_level + level);
        const auto schedule = last_step_schedule(p, lower, kUnit);
        ASSERT_EQ(schedules->lengths[level], static_cast<int>(schedule->steps.size()));
        const float* q = schedules->coefficients + ptrdiff_t{3} * level * schedules->steps;
        for (const auto& step : schedule->steps) {
          EXPECT_FLOAT_EQ(q[0], static_cast<float>(step.a));
          EXPECT_FLOAT_EQ(q[1], static_cast<float>(step.b));
          EXPECT_FLOAT_EQ(q[2], static_cast<float>(step.c));
          q += 3;
        }
        for (const double x : {0.9, 1.0, 1.1}) {
          EXPECT_NEAR(last_factor(schedules->last[level], static_cast<float>(x)),
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
torch::Tensor inverse_root(torch::Tensor M, int64_t p, int level) {
  const auto schedule = last_step_schedule(p, std::exp2(level), kUnit);
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

TEST(LastStep, RoundingToFp16IsWithinTheTolerance) {
  const int64_t n = 48;
  const auto Q = random_basis(n);
  for (const int64_t p : {1, 2, 3, 4, 6, 8}) {
    for (const int level : {-12, -10, -7, -4, -1}) {
      const auto spectrum = torch::exp2(torch::linspace(level, 0, n, torch::kDouble));
      const auto M = (Q * spectrum).matmul(Q.t());
      const auto root = (Q * spectrum.pow(-1.0 / static_cast<double>(p))).matmul(Q.t());
      const auto X = inverse_root(M.to(torch::kFloat), p, level).to(torch::kDouble);
      const double own = std::exp2(-23 - 0.5 * level);  // of the steps before the last one
      EXPECT_LT(((X - root).norm() / root.norm()).item<double>(), 2 * (own + 3e-5))
          << "p = " << p << ", level = " << level;
    }
  }
}

// The largest entries of X must not hide the directions of the largest eigenvalues.
TEST(LastStep, RoundingToFp16KeepsTheResidualSmall) {
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
