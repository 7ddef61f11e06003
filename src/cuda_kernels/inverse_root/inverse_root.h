// Shared by the kernels for inverse p-th roots.
#pragma once

#include <cstdint>

namespace torchium::cuda_kernels {

struct NewtonRule {
  int n;
  int p;
  // damping = max(eps, least_damping |A|_F) + relative_eps bound
  double eps, relative_eps, least_damping;
  double noise;  // rounding noise of the eigenvalues, in units of the bound
  // The interval starts at max(damping, noise_margin (noise - damping), lowest_start), in units of
  // its upper end: linalg/roots/newton.h.
  double noise_margin, lowest_start;
  double smallest_floor;
  // X is scaled by `first`, so it stays within the range of fp16.
  float first;
  // A root with a larger residual, or an entry above largest_root floor^(-1/p), is replaced by
  // top^(-1/p) I, where the spectrum is in [0, top]. Its iterations are 0, and its residual is
  // above the tolerance.
  float residual_tolerance;
  float largest_root;
};

// A batch of `matrices` float32 matrices. For a matrix with NaN or Inf, all results are NaN and
// `iterations` is 0.
struct InverseRoot {
  const float* A;       // [matrices, n, n], contiguous; its symmetric part is used
  float* root;          // [matrices, n, n]: (A + damping I)^(-1/p), exactly symmetric
  float* residual;      // [matrices]: |D X^p D v - D v| / |D|_F, D = A + damping I, v random signs
  double* damping;      // [matrices]
  double* floor;        // [matrices]
  int64_t* iterations;  // [matrices]
  int64_t matrices;
  NewtonRule rule;
  // [matrices]: the root is that of A / divisor; null: of A.
  const double* divisors = nullptr;
  // [matrices]: eps of each; null: that of the rule.
  const double* eps = nullptr;
  // [matrices]: consecutive failures, for roots updated in place. An accepted root whose entries
  // are in the range of float32 resets the count to 0; any other is not written and adds 1. Null:
  // every root is written.
  int32_t* failures = nullptr;
  // With failures: if false, neither they nor the roots change. Null: true.
  const bool* keep = nullptr;
  // [matrices]: the roots that are wanted; the others do not change. Null: all.
  const bool* wanted = nullptr;
};

}  // namespace torchium::cuda_kernels
