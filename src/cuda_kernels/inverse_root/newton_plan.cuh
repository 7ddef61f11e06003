// The plan of one matrix before the coupled iteration.
#pragma once

#include "cuda_kernels/inverse_root/inverse_root.h"
#include "cuda_kernels/inverse_root/root_schedule_table.h"

#include <cfloat>
#include <cmath>

namespace torchium::cuda_kernels {

// The iteration runs on M = (scale S + damping I) / top, where S is the symmetric part of A. The
// scale of A / divisor is a power of two.
struct NewtonPlan {
  static constexpr int kNotFinite = -1;

  float scale;  // of A
  float inverse_top;
  float shift;   // damping / top
  float factor;  // from the root of M to the root of A
  float limit;   // of the entries of the root of M
  float norm;    // at least |M|_F, and about it
  int level;     // the spectrum of M is in [2^level, 1]
  int steps;     // quadratic ones; kNotFinite for a matrix that is not finite
};

// All norms are those of scale S, in the same units as damping and top.
struct SpectralBound {
  double scale;    // of A
  double divided;  // of A / divisor
  double frobenius, damping, top;
};

// Whether the root of a matrix may change.
__device__ inline bool may_change(const InverseRoot& arguments, int64_t matrix) {
  return (arguments.keep == nullptr || *arguments.keep) &&
         (arguments.wanted == nullptr || arguments.wanted[matrix]);
}

// Whether a root is written that was accepted, or not.
__device__ inline bool is_written(const InverseRoot& arguments, int64_t matrix, bool accepted) {
  return may_change(arguments, matrix) && (accepted || arguments.failures == nullptr);
}

// One thread of a matrix.
__device__ inline void count_failure(const InverseRoot& arguments, int64_t matrix, bool accepted) {
  if (arguments.failures == nullptr || !may_change(arguments, matrix)) return;
  arguments.failures[matrix] = accepted ? 0 : arguments.failures[matrix] + 1;
}

// Whether the root of M, with entries up to `largest`, is accepted.
__device__ inline bool accepts(const InverseRoot& arguments, const NewtonPlan& plan, float residual,
                               float largest) {
  return residual <= arguments.rule.residual_tolerance && largest <= plan.limit &&
         (arguments.failures == nullptr || largest * plan.factor <= FLT_MAX);
}

__device__ inline double divisor_of(const InverseRoot& arguments, int64_t matrix) {
  return arguments.divisors == nullptr ? 1.0 : arguments.divisors[matrix];
}

__device__ inline double eps_of(const InverseRoot& arguments, int64_t matrix) {
  return arguments.eps == nullptr ? arguments.rule.eps : arguments.eps[matrix];
}

// 2^-e that brings the larger of eps and `largest`, both of A / divisor, to [1/2, 1), if it exists
// and stays finite when divided by the divisor.
__device__ inline float newton_scale(float largest, double eps, double divisor) {
  int exponent = 0;
  frexpf(fmaxf(largest, static_cast<float>(fmin(eps, double{FLT_MAX}))), &exponent);
  const int most = 126 + min(0, ilogb(divisor));
  return ldexpf(1.0f, max(-126, min(most, -exponent)));
}

// The smallest top that keeps even the root of a null matrix finite.
__device__ inline double least_top(const NewtonRule& rule, double scale) {
  return scale * (rule.smallest_floor / (rule.noise_margin * rule.noise));
}

// From the scale of A / divisor, and the largest absolute row sum and Frobenius norm of scale S.
__device__ inline SpectralBound bound_spectrum(const NewtonRule& rule, double eps, double scale,
                                               double divisor, double row_sum, double frobenius) {
  constexpr double kUnit = FLT_EPSILON / 2;
  const double bound = fmin(row_sum, frobenius) * (1 + 2 * kUnit * rule.n);
  const double damping =
      fmax(scale * eps, rule.least_damping * frobenius) + rule.relative_eps * bound;
  const double top = fmax((bound + damping) * (1 + 2 * kUnit), least_top(rule, scale));
  return {scale / divisor, scale, frobenius, damping, top};
}

// Writes damping and floor in units of A / divisor.
__device__ inline NewtonPlan plan_newton(const NewtonRule& rule, const RootScheduleTable& schedules,
                                         bool finite, const SpectralBound& bound,
                                         double* damping_of_A, double* floor_of_A) {
  const double top = bound.top, relative = bound.damping / top;
  const double start =
      fmax(fmax(relative, rule.noise_margin * (rule.noise - relative)), rule.lowest_start);
  int exponent = 0;
  frexp(start, &exponent);
  const int level = max(schedules.lowest_level, min(exponent - 1, 0));
  const double power = -1.0 / rule.p;
  *damping_of_A = finite ? bound.damping / bound.divided : NAN;
  *floor_of_A = finite ? top / bound.divided * exp2(static_cast<double>(level)) : NAN;
  return {static_cast<float>(bound.scale),
          static_cast<float>(1 / top),
          static_cast<float>(relative),
          static_cast<float>(pow(top / bound.divided, power)),
          static_cast<float>(rule.largest_root * exp2(level * power)),
          static_cast<float>(bound.frobenius / top + relative * sqrt(static_cast<double>(rule.n))),
          level,
          finite ? schedules.lengths[level - schedules.lowest_level] : NewtonPlan::kNotFinite};
}

// Results saturate at the largest number.
__device__ inline float saturated(float x) { return fminf(fmaxf(x, -FLT_MAX), FLT_MAX); }

// A random sign: a hash of the row.
__device__ inline float probe_sign(int row) {
  uint32_t hash = (row + 1) * 0x9E3779B1u;
  hash = (hash ^ (hash >> 15)) * 0x85EBCA77u;
  return (hash >> 16) & 1 ? 1.0f : -1.0f;
}

}  // namespace torchium::cuda_kernels
