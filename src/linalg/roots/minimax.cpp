#include "linalg/roots/minimax.h"

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
// An error below which the exchange would lose digits.
constexpr double kSmallestLevel = 1e-14;

struct Interval {
  double lower, upper;
};

// A polynomial in t = (x - middle) / half, for which the exchange's systems are well conditioned.
template <size_t degree>
struct Polynomial {
  std::array<double, degree + 1> coefficients;
  double middle, half;

  double operator()(double x) const {
    const double t = (x - middle) / half;
    double sum = 0;
    for (size_t j = degree + 1; j-- > 0;) {
      sum = sum * t + coefficients[j];
    }
    return sum;
  }

  double derivative(double x) const {
    const double t = (x - middle) / half;
    double sum = 0;
    for (size_t j = degree; j > 0; --j) {
      sum = sum * t + static_cast<double>(j) * coefficients[j];
    }
    return sum / half;
  }

  // Coefficients of the powers of x - center.
  std::array<double, degree + 1> about(double center) const {
    std::array<double, degree + 1> shifted = coefficients;
    const double t = (center - middle) / half;
    double unit = 1;
    for (size_t k = 0; k <= degree; ++k) {
      for (size_t j = degree; j-- > k;) {
        shifted[j] += t * shifted[j + 1];
      }
    }
    for (double& coefficient : shifted) {
      coefficient *= unit;
      unit /= half;
    }
    return shifted;
  }
};

// q and max |1 - x^(1/p) q(x)| over its interval.
template <size_t degree>
struct Approximation {
  Polynomial<degree> q;
  double error;
};

// Solves the augmented system by Gaussian elimination with partial pivoting.
template <size_t n>
std::array<double, n> solve(std::array<std::array<double, n + 1>, n> rows) {
  for (size_t k = 0; k < n; ++k) {
    const auto pivot = std::max_element(rows.begin() + k, rows.end(), [k](auto& r, auto& s) {
      return std::abs(r[k]) < std::abs(s[k]);
    });
    std::swap(rows[k], *pivot);
    for (size_t i = k + 1; i < n; ++i) {
      const double factor = rows[i][k] / rows[k][k];
      for (size_t j = k; j <= n; ++j) {
        rows[i][j] -= factor * rows[k][j];
      }
    }
  }
  std::array<double, n> x{};
  for (size_t k = n; k-- > 0;) {
    double sum = rows[k][n];
    for (size_t j = k + 1; j < n; ++j) {
      sum -= rows[k][j] * x[j];
    }
    x[k] = sum / rows[k][k];
  }
  return x;
}

template <size_t degree>
using Nodes = std::array<double, degree + 2>;

// q with equal errors 1 - x^(1/p) q(x) of alternating sign at the nodes, except that inner minima
// of x^(1/p) q(x) have `inner` times the error.
template <size_t degree>
Approximation<degree> equioscillating(const Nodes<degree>& nodes, double p, double inner) {
  constexpr size_t n = degree + 2;
  Polynomial<degree> q{{}, (nodes.back() + nodes.front()) / 2, (nodes.back() - nodes.front()) / 2};
  std::array<std::array<double, n + 1>, n> rows{};
  for (size_t i = 0; i < n; ++i) {
    double power = std::pow(nodes[i], 1 / p);
    for (size_t j = 0; j <= degree; ++j) {
      rows[i][j] = power;
      power *= (nodes[i] - q.middle) / q.half;
    }
    rows[i][degree + 1] = i == 0 ? 1.0 : i % 2 == 0 ? inner : -1.0;
    rows[i][n] = 1.0;
  }
  const std::array<double, n> solution = solve<n>(rows);
  std::copy_n(solution.begin(), degree + 1, q.coefficients.begin());
  return {q, std::abs(solution.back())};
}

// A point between 0 < lower < upper where f changes its sign.
template <typename Function>
double sign_change(const Function& f, double lower, double upper) {
  const bool is_positive = f(lower) > 0;
  for (int halving = 0; halving < 45; ++halving) {
    const double middle = std::sqrt(lower * upper);
    ((f(middle) > 0) == is_positive ? lower : upper) = middle;
  }
  return std::sqrt(lower * upper);
}

// Remez exchange. x^(1/p), x^(1+1/p), ... form a Chebyshev system on x > 0, so the error of the
// best q equioscillates on degree + 2 points: both ends and the interior extrema. A q that
// alternates on any nodes has one extremum between adjacent zeros of its error.
template <size_t degree>
Approximation<degree> remez(double p, const Interval& interval, double inner) {
  // Start: Chebyshev points in the variable x^(1/p).
  const double first = std::pow(interval.lower, 1 / p);
  const double last = std::pow(interval.upper, 1 / p);
  Nodes<degree> nodes;
  for (size_t i = 0; i < nodes.size(); ++i) {
    const double share = (1 - std::cos(M_PI * static_cast<double>(i) / (degree + 1))) / 2;
    nodes[i] = std::pow(first + share * (last - first), p);
  }
  nodes.front() = interval.lower;
  nodes.back() = interval.upper;
  Approximation<degree> result{};
  const auto error = [&](double x) { return 1 - std::pow(x, 1 / p) * result.q(x); };
  const auto slope = [&](double x) { return result.q(x) + p * x * result.q.derivative(x); };
  for (int exchange = 0; exchange < 100; ++exchange) {
    result = equioscillating<degree>(nodes, p, inner);
    if (!(result.error > kSmallestLevel)) {
      break;
    }
    std::array<double, degree + 1> zeros;
    for (size_t i = 0; i <= degree; ++i) {
      zeros[i] = sign_change(error, nodes[i], nodes[i + 1]);
    }
    double moved = 0;
    for (size_t i = 1; i <= degree; ++i) {
      const double extremum = sign_change(slope, zeros[i - 1], zeros[i]);
      moved += std::abs(extremum / nodes[i] - 1);
      nodes[i] = extremum;
    }
    if (moved < 1e-9) {
      break;
    }
  }
  for (const double x : nodes) {
    result.error = std::max(result.error, std::abs(error(x)));
  }
  return result;
}

// Taylor polynomial of x^(-1/p) at 1 and its error on a narrow interval around 1.
template <size_t degree>
Approximation<degree> taylor(double p, const Interval& interval) {
  const double width = std::max(interval.upper - 1, 1 - interval.lower);
  Polynomial<degree> q{{}, 1, 1};
  double binomial = 1, power = 1;
  for (size_t j = 0; j <= degree; ++j) {
    q.coefficients[j] = binomial;
    binomial *= -(1 / p + static_cast<double>(j)) / static_cast<double>(j + 1);
    power *= width;
  }
  return {q, std::abs(binomial) * power * (1 + 4 * width)};
}

// The best q of a degree. Where the exchange would lose digits, the Taylor polynomial at 1: its
// error there is below 1e-9 / p and within a factor of 2^degree of the best.
template <size_t degree>
Approximation<degree> approximate(int64_t root, const Interval& interval, double inner = 1) {
  const double narrow = std::pow(1e-9, 1.0 / (degree + 1));
  const auto p = static_cast<double>(root);
  return interval.upper - interval.lower < 2 * narrow ? taylor<degree>(p, interval)
                                                      : remez<degree>(p, interval, inner);
}

MinimaxStep quadratic(const Polynomial<2>& q) {
  const auto [a, b, c] = q.about(0);
  return {a, b, c};
}

// The form of q that LastStep evaluates: V is the polynomial part of the square root of q / e.
LastStep last_step(const Polynomial<6>& q, double center) {
  const auto w = q.about(center);
  const double e = w[6];
  const double f = w[5] / (2 * e);
  const double g = (w[4] / e - f * f) / 2;
  const double d = w[3] - 2 * e * f * g;
  const double c = w[2] - e * g * g - d * f;
  return {center, w[0] - 1, w[1] - d * g, c, d, e, f, g};
}

// The minimax q, or where precision matters a q that keeps medium eigenvalues large. The minimax q
// maps some of them to the lower end of the next interval. The rounding errors of M are relative to
// its largest entries, so these eigenvalues and their eigenvectors lose digits, and so does the
// residual if one was the largest. Inner minima 256 times above the lower end (or errors half as
// large there, which is 10 times for p = 100) make that end at most 19 % smaller.
Approximation<2> quadratic_step(int64_t root, const Interval& interval, double unit_roundoff) {
  const auto best = approximate<2>(root, interval);
  if (interval.lower >= 256 * unit_roundoff) {
    return best;
  }
  const double minimum = std::pow(256.0, 1 / static_cast<double>(root)) * (1 - best.error);
  return approximate<2>(root, interval, std::clamp((1 - minimum) / best.error, 0.5, 1.0));
}

// The intervals of the spectrum of M before each step.
class IterationSpectrum {
 public:
  IterationSpectrum(int64_t root, double lower, double unit_roundoff)
      : p_(static_cast<double>(root)),
        // Relative rounding error of q^p M, as a fraction of the largest eigenvalue.
        rounding_(4 * unit_roundoff * std::max(1.0, p_ / 4)),
        interval_{lower, 1 + rounding_} {}

  const Interval& interval() const { return interval_; }

  // After a step with max |1 - x^(1/p) q(x)| = error.
  void step(double error) {
    const double upper = std::pow(1 + error, p_);
    const double lower = std::pow(1 - error, p_);
    // Rounding may lower the lower end, but not by more than half: the caller's floor is above it.
    interval_ = {std::max(lower - rounding_ * upper, lower / 2), upper * (1 + rounding_)};
  }

 private:
  double p_, rounding_;
  Interval interval_;
};

std::vector<MinimaxStep> make_schedule(int64_t root, double lower, double unit_roundoff) {
  IterationSpectrum spectrum(root, lower, unit_roundoff);
  std::vector<MinimaxStep> steps;
  while (static_cast<int>(steps.size()) < kMaxSteps) {
    const auto [q, error] = quadratic_step(root, spectrum.interval(), unit_roundoff);
    steps.push_back(quadratic(q));
    if (error <= 2 * unit_roundoff) {
      break;
    }
    spectrum.step(error);
  }
  return steps;
}

// The error that the last step may add. The steps before it leave about u / sqrt(lower) with
// float32 products (measured for p = 1 to 8). At most 3e-5, because part of it is systematic. At
// least 8e-6, eigh's error in float32 at a condition of 100.
double last_step_tolerance(double lower, double unit_roundoff) {
  return std::clamp(2 * unit_roundoff / std::sqrt(lower), 8e-6, 3e-5);
}

// Whether 1 + W = q may be evaluated in single fp16 products. Their rounding error relative to the
// root is about 2^-13 max |W|: measured for p = 1 to 8 and random eigenvectors, n = 64, within a
// factor of two, and up to four times that for multiples of the identity. An error of X W is
// relative to the largest entries of X, 2^-12 max |W| lower^(-1/p), also in the directions of the
// largest eigenvalues. X^p M has p times that, which decides for p = 1.
bool may_be_last(const Approximation<6>& last, const Interval& interval, double p, double lower,
                 double tolerance) {
  const double largest =
      std::max(std::abs(last.q(interval.lower) - 1), std::abs(last.q(interval.upper) - 1));
  return last.error + 0x1p-13 * largest <= tolerance &&
         p * 0x1p-12 * largest * std::pow(lower, -1 / p) <= 0.1;
}

LastStepSchedule make_last_step_schedule(int64_t root, double lower, double unit_roundoff) {
  const double tolerance = last_step_tolerance(lower, unit_roundoff);
  IterationSpectrum spectrum(root, lower, unit_roundoff);
  LastStepSchedule result{};
  for (;;) {
    const Interval& interval = spectrum.interval();
    const auto last = approximate<6>(root, interval);
    if (may_be_last(last, interval, static_cast<double>(root), lower, tolerance) ||
        static_cast<int>(result.steps.size()) == kMaxSteps) {
      result.last = last_step(last.q, (interval.lower + interval.upper) / 2);
      result.error = last.error;
      return result;
    }
    const auto step = quadratic_step(root, interval, unit_roundoff);
    result.steps.push_back(quadratic(step.q));
    spectrum.step(step.error);
  }
}

// make(root, lower, unit_roundoff), cached by its arguments.
template <typename Schedule, typename Make>
std::shared_ptr<const Schedule> kept(const Make& make, int64_t root, double lower,
                                     double unit_roundoff) {
  static std::mutex mutex;
  static std::map<std::tuple<int64_t, double, double>, std::shared_ptr<const Schedule>> schedules;
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<const Schedule>& schedule = schedules[{root, lower, unit_roundoff}];
  if (!schedule) {
    schedule = std::make_shared<const Schedule>(make(root, lower, unit_roundoff));
  }
  return schedule;
}

}  // namespace

std::shared_ptr<const std::vector<MinimaxStep>> minimax_schedule(int64_t root, double lower,
                                                                 double unit_roundoff) {
  return kept<std::vector<MinimaxStep>>(make_schedule, root, lower, unit_roundoff);
}

std::shared_ptr<const LastStepSchedule> last_step_schedule(int64_t root, double lower,
                                                           double unit_roundoff) {
  return kept<LastStepSchedule>(make_last_step_schedule, root, lower, unit_roundoff);
}

}  // namespace torchium::linalg::detail
