#include "linalg/minimax.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

namespace torchium::linalg::detail {
namespace {

constexpr int kMaxSteps = 200;
// Relative half width of an interval below which the Taylor polynomial at 1 takes over: its error
// is within a factor of four of the best, and the exchange would lose digits.
constexpr double kTaylorWidth = 1e-3;

struct Interval {
  double lower, upper;
};

// A step and max |1 - x^(1/p) q(x)| over the interval it was made for.
struct Approximation {
  MinimaxStep step;
  double error;
};

double evaluate(const MinimaxStep& q, double x) { return q.a + x * (q.b + x * q.c); }

// Solves the 4 x 5 augmented system by Gaussian elimination with partial pivoting.
std::array<double, 4> solve(std::array<std::array<double, 5>, 4> rows) {
  for (size_t k = 0; k < 4; ++k) {
    const auto pivot = std::max_element(rows.begin() + k, rows.end(), [k](auto& r, auto& s) {
      return std::abs(r[k]) < std::abs(s[k]);
    });
    std::swap(rows[k], *pivot);
    for (size_t i = k + 1; i < 4; ++i) {
      const double factor = rows[i][k] / rows[k][k];
      for (size_t j = k; j < 5; ++j) {
        rows[i][j] -= factor * rows[k][j];
      }
    }
  }
  std::array<double, 4> x{};
  for (size_t k = 4; k-- > 0;) {
    double sum = rows[k][4];
    for (size_t j = k + 1; j < 4; ++j) {
      sum -= rows[k][j] * x[j];
    }
    x[k] = sum / rows[k][k];
  }
  return x;
}

// q whose errors 1 - x^(1/p) q(x) at the four nodes are equal with alternating signs. Solved in
// t = (x - middle) / half, where the system is well conditioned.
MinimaxStep equioscillating(const std::array<double, 4>& nodes, double inverse_root) {
  const double middle = (nodes.front() + nodes.back()) / 2;
  const double half = (nodes.back() - nodes.front()) / 2;
  std::array<std::array<double, 5>, 4> rows{};
  for (size_t i = 0; i < 4; ++i) {
    const double t = (nodes[i] - middle) / half;
    const double weight = std::pow(nodes[i], inverse_root);
    rows[i] = {weight, weight * t, weight * t * t, i % 2 == 0 ? 1.0 : -1.0, 1.0};
  }
  const auto [r, s, u, signed_error] = solve(rows);
  const double linear = s / half;
  const double square = u / (half * half);
  return {r - middle * (linear - middle * square), linear - 2 * middle * square, square};
}

// The two interior extrema of x^(1/p) q(x): roots of a + (1 + p) b x + (1 + 2 p) c x^2.
std::pair<double, double> interior_extrema(const MinimaxStep& q, double root) {
  const double linear = (1 + root) * q.b;
  const double square = (1 + 2 * root) * q.c;
  const double discriminant = std::max(0.0, linear * linear - 4 * q.a * square);
  const double sum = -(linear - std::sqrt(discriminant)) / 2;  // b < 0: no cancellation
  return {q.a / sum, sum / square};
}

// Remez exchange. x^(1/p), x^(1+1/p), x^(2+1/p) form a Chebyshev system on x > 0, so that the best
// q is the one whose error equioscillates on four points: both ends and the interior extrema.
Approximation remez(int64_t root, const Interval& interval) {
  const double p = static_cast<double>(root);
  const auto [lower, upper] = interval;
  // Start: Chebyshev points in the variable x^(1/p).
  const double first = std::pow(lower, 1 / p);
  const double last = std::pow(upper, 1 / p);
  std::array<double, 4> nodes{lower, std::pow(0.75 * first + 0.25 * last, p),
                              std::pow(0.25 * first + 0.75 * last, p), upper};
  MinimaxStep q{};
  for (int exchange = 0; exchange < 100; ++exchange) {
    q = equioscillating(nodes, 1 / p);
    const auto [second, third] = interior_extrema(q, p);
    const double moved = std::abs(second / nodes[1] - 1) + std::abs(third / nodes[2] - 1);
    nodes[1] = std::clamp(second, lower, upper);
    nodes[2] = std::clamp(third, lower, upper);
    if (moved < 1e-9 || !(nodes[1] < nodes[2])) {
      break;
    }
  }
  double error = 0;
  for (const double x : nodes) {
    error = std::max(error, std::abs(1 - std::pow(x, 1 / p) * evaluate(q, x)));
  }
  return {q, error};
}

// Taylor polynomial of x^(-1/p) at 1 and its error on a narrow interval around 1.
Approximation taylor(int64_t root, const Interval& interval) {
  const double r = 1 / static_cast<double>(root);
  const double second = r * (r + 1) / 2;
  const double width = std::max(interval.upper - 1, 1 - interval.lower);
  return {{1 + r + second, -r - 2 * second, second},
          second * (r + 2) / 3 * width * width * width * (1 + 4 * width)};
}

std::vector<MinimaxStep> make_schedule(int64_t root, double lower, double unit_roundoff) {
  const double p = static_cast<double>(root);
  // Relative rounding error of q^p M, as a share of the largest eigenvalue.
  const double rounding = 4 * unit_roundoff * std::max(1.0, p / 4);
  Interval interval{lower, 1 + rounding};
  std::vector<MinimaxStep> steps;
  while (static_cast<int>(steps.size()) < kMaxSteps) {
    const bool narrow = interval.upper - interval.lower < 2 * kTaylorWidth;
    const auto [step, error] = narrow ? taylor(root, interval) : remez(root, interval);
    steps.push_back(step);
    if (error <= 2 * unit_roundoff) {
      break;
    }
    const double upper = std::pow(1 + error, p);
    const double next_lower = std::pow(1 - error, p);
    // Rounding may blur the lower end, but not by more than half: the floor of the caller is
    // above it.
    interval = {std::max(next_lower - rounding * upper, next_lower / 2), upper * (1 + rounding)};
  }
  return steps;
}

}  // namespace

std::shared_ptr<const std::vector<MinimaxStep>> minimax_schedule(int64_t root, double lower,
                                                                 double unit_roundoff) {
  using Schedule = std::shared_ptr<const std::vector<MinimaxStep>>;
  static std::mutex mutex;
  static std::map<std::tuple<int64_t, double, double>, Schedule> schedules;
  const std::lock_guard<std::mutex> lock(mutex);
  Schedule& schedule = schedules[{root, lower, unit_roundoff}];
  if (!schedule) {
    schedule =
        std::make_shared<const std::vector<MinimaxStep>>(make_schedule(root, lower, unit_roundoff));
  }
  return schedule;
}

}  // namespace torchium::linalg::detail
