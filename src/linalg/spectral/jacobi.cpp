#include "linalg/spectral/jacobi.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace torchium::linalg::detail {
namespace {

// Convergence is eventually quadratic: 6 to 10 sweeps for orders up to a thousand.
constexpr int kMostSweeps = 60;

// x <- c x - s y, y <- s x + c y
void rotate(double* x, double* y, int64_t n, double c, double s) {
  for (int64_t i = 0; i < n; ++i) {
    const double before = x[i];
    x[i] = c * before - s * y[i];
    y[i] = s * before + c * y[i];
  }
}

// Zeroes A_pq.
void annihilate(double* A, double* V, int64_t n, int64_t p, int64_t q) {
  double* row_p = A + p * n;
  double* row_q = A + q * n;
  const double app = row_p[p], aqq = row_q[q], apq = row_p[q];
  const double theta = (aqq - app) / (2 * apq);
  const double t = std::copysign(1.0, theta) / (std::abs(theta) + std::hypot(theta, 1.0));
  const double c = 1 / std::hypot(t, 1.0);
  const double s = t * c;
  rotate(row_p, row_q, n, c, s);
  for (int64_t i = 0; i < n; ++i) {
    A[i * n + p] = row_p[i];
    A[i * n + q] = row_q[i];
  }
  row_p[p] = app - t * apq;
  row_q[q] = aqq + t * apq;
  row_p[q] = row_q[p] = 0;
  rotate(V + p * n, V + q * n, n, c, s);
}

}  // namespace

void jacobi_eigensystem(double* A, double* V, int64_t n) {
  std::fill(V, V + n * n, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    V[i * n + i] = 1;
  }
  double squares = 0;
  for (int64_t i = 0; i < n * n; ++i) {
    squares += A[i] * A[i];
  }
  // All skipped entries together amount to a rounding error of the largest eigenvalue.
  const double negligible =
      std::numeric_limits<double>::epsilon() / 4 * std::sqrt(squares) / static_cast<double>(n);
  bool has_rotated = true;
  for (int sweep = 0; has_rotated && sweep < kMostSweeps; ++sweep) {
    has_rotated = false;
    for (int64_t p = 0; p + 1 < n; ++p) {
      for (int64_t q = p + 1; q < n; ++q) {
        if (std::abs(A[p * n + q]) > negligible) {
          annihilate(A, V, n, p, q);
          has_rotated = true;
        }
      }
    }
  }
}

}  // namespace torchium::linalg::detail
