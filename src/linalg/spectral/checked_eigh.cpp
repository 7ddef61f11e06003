#include "linalg/spectral/checked_eigh.h"

#include "linalg/spectral/eigh.h"
#include "linalg/spectral/jacobi.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

namespace torchium::linalg::detail {
namespace {

std::atomic<int64_t> retries{0};
std::atomic<int> wrong_attempts{0};

// Off-diagonal entries so small that products with them underflow count as zero.
template <typename scalar_t>
bool is_coupled(const scalar_t* row, int64_t i, int64_t n) {
  constexpr scalar_t kNegligible =
      std::numeric_limits<scalar_t>::min() / std::numeric_limits<scalar_t>::epsilon();
  const auto counts = [](scalar_t entry) { return std::abs(entry) > kNegligible; };
  return std::any_of(row, row + i, counts) || std::any_of(row + i + 1, row + n, counts);
}

// Rows of S [n, n] with more entries than S_ii.
template <typename scalar_t>
std::vector<int64_t> coupled_rows(const scalar_t* S, int64_t n) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < n; ++i) {
    if (is_coupled(S + i * n, i, n)) {
      rows.push_back(i);
    }
  }
  return rows;
}

template <typename scalar_t>
scalar_t dot(const scalar_t* x, const scalar_t* y, int64_t n) {
  std::array<scalar_t, 16> sums{};  // independent of each other
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int64_t k = 0; k < 16; ++k) {
      sums[k] += x[i + k] * y[i + k];
    }
  }
  for (; i < n; ++i) {
    sums[0] += x[i] * y[i];
  }
  return std::accumulate(sums.begin(), sums.end(), scalar_t{0});
}

template <typename scalar_t>
double norm(const std::vector<scalar_t>& x) {
  double sum = 0;
  for (const scalar_t entry : x) {
    sum += static_cast<double>(entry) * entry;
  }
  return std::sqrt(sum);
}

template <typename scalar_t>
std::vector<scalar_t> signs(int64_t n) {
  std::vector<scalar_t> z(n);
  uint64_t state = 0x9E3779B97F4A7C15;
  for (scalar_t& entry : z) {
    state = state * 6364136223846793005 + 1442695040888963407;
    entry = state >> 63 ? scalar_t{1} : scalar_t{-1};
  }
  return z;
}

// LAPACK's errors are 1 to 10 units of eigenvalue_noise(); wrong results are far off.
constexpr double kTolerance = 100.0;

// |S z - Q D Q^T z| <= tolerance |S| |z| and |z - Q Q^T z| <= tolerance |z|.
template <typename scalar_t>
bool fits_signs(const scalar_t* S, const scalar_t* values, const scalar_t* Q, int64_t n) {
  const std::vector<scalar_t> z = signs<scalar_t>(n);
  std::vector<scalar_t> residual(n, 0), departure(z);
  double largest = std::numeric_limits<scalar_t>::min();
  for (int64_t j = 0; j < n; ++j) {
    const scalar_t* row = S + j * n;
    const scalar_t* column = Q + j * n;
    const scalar_t y = dot(column, z.data(), n);
    const scalar_t image = values[j] * y;
    for (int64_t i = 0; i < n; ++i) {
      residual[i] += z[j] * row[i] - image * column[i];
      departure[i] -= y * column[i];
    }
    largest = std::max<double>(largest, std::abs(values[j]));
  }
  const double tolerance = kTolerance * eigenvalue_noise(n, c10::CppTypeToScalarType<scalar_t>()) *
                           std::sqrt(static_cast<double>(n));
  return norm(residual) <= tolerance * largest && norm(departure) <= tolerance;
}

// In float64, LAPACK's layout.
struct Solution {
  at::Tensor values, vectors;
};

// at::linalg_eigh of a matrix or a batch; false if one did not converge.
bool solve_by_lapack(const at::Tensor& S, at::Tensor values, at::Tensor vectors, int attempt) {
  try {
    // S is its own transpose; in LAPACK's layout it is copied without transposing.
    at::linalg_eigh_out(values, vectors, S.mT());
    if (attempt <= wrong_attempts) {
      values.neg_();
    }
    return true;
  } catch (const c10::LinAlgError&) {
    return false;
  }
}

// Of S + shift I. The shift is small enough to cost no digits, and large enough to avoid underflow.
bool solve_shifted(const at::Tensor& S, Solution& solution) {
  const at::Tensor shift = S.abs().max() / 16;
  at::Tensor shifted = S.clone();
  shifted.diagonal().add_(shift);
  if (!solve_by_lapack(shifted, solution.values, solution.vectors, /*attempt=*/2)) {
    return false;
  }
  solution.values.sub_(shift);
  return is_eigensystem(S, solution.values, solution.vectors);
}

void solve_by_jacobi(const at::Tensor& S, Solution& solution) {
  at::Tensor A = S.clone();
  at::Tensor V = at::empty_like(A);
  jacobi_eigensystem(A.mutable_data_ptr<double>(), V.mutable_data_ptr<double>(), S.size(0));
  const auto [values, order] = A.diagonal().sort();
  solution.values.copy_(values);
  solution.vectors.copy_(V.index_select(0, order).mT());
}

void solve_again(const at::Tensor& S, at::Tensor values, at::Tensor vectors) {
  ++retries;
  const at::Tensor S64 = S.to(at::kDouble);
  Solution solution{at::empty({S.size(0)}, S64.options()),
                    at::empty(S.sizes(), S64.options()).mT()};
  if (!solve_shifted(S64, solution)) {
    solve_by_jacobi(S64, solution);
  }
  values.copy_(solution.values);
  vectors.copy_(solution.vectors);
}

// For S [n, n] whose rows are all coupled.
void solve_coupled(const at::Tensor& S, at::Tensor values, at::Tensor vectors) {
  if (!solve_by_lapack(S, values, vectors, /*attempt=*/1) || !is_eigensystem(S, values, vectors)) {
    solve_again(S, values, vectors);
  }
}

// An uncoupled row has the eigenvalue S_ii and a unit vector; the coupled rows are a smaller
// problem.
template <typename scalar_t>
void solve_by_parts(const at::Tensor& S, const std::vector<int64_t>& coupled, at::Tensor values,
                    at::Tensor vectors) {
  const auto n = S.size(0), m = static_cast<int64_t>(coupled.size());
  at::Tensor part_values = at::empty({m}, S.options());
  at::Tensor part_vectors = at::empty({m, m}, S.options());  // in rows
  if (m > 0) {
    const at::Tensor index = at::tensor(coupled, at::kLong);
    solve_coupled(S.index_select(0, index).index_select(1, index), part_values, part_vectors.mT());
  }
  // Eigenvalues, and positions of their vectors: k in the part, or m + i for the i-th unit vector.
  std::vector<std::pair<scalar_t, int64_t>> order;
  for (int64_t k = 0; k < m; ++k) {
    order.emplace_back(part_values.const_data_ptr<scalar_t>()[k], k);
  }
  for (int64_t i = 0, k = 0; i < n; ++i) {
    if (k < m && coupled[k] == i) {
      ++k;
    } else {
      order.emplace_back(S.const_data_ptr<scalar_t>()[i * n + i], m + i);
    }
  }
  std::sort(order.begin(), order.end());
  vectors.zero_();
  for (int64_t column = 0; column < n; ++column) {
    const auto [value, source] = order[column];
    values.mutable_data_ptr<scalar_t>()[column] = value;
    scalar_t* target = vectors.mutable_data_ptr<scalar_t>() + column * n;
    if (source >= m) {
      target[source - m] = 1;
      continue;
    }
    const scalar_t* vector = part_vectors.const_data_ptr<scalar_t>() + source * m;
    for (int64_t k = 0; k < m; ++k) {
      target[coupled[k]] = vector[k];
    }
  }
}

}  // namespace

bool is_eigensystem(const at::Tensor& S, const at::Tensor& values, const at::Tensor& vectors) {
  return AT_DISPATCH_FLOATING_TYPES(S.scalar_type(), "is_eigensystem", [&] {
    return fits_signs(S.const_data_ptr<scalar_t>(), values.const_data_ptr<scalar_t>(),
                      vectors.const_data_ptr<scalar_t>(), S.size(0));
  });
}

void solve_checked(const at::Tensor& S, at::Tensor values, at::Tensor vectors) {
  AT_DISPATCH_FLOATING_TYPES(S.scalar_type(), "solve_checked", [&] {
    const int64_t n = S.size(-1);
    std::vector<std::vector<int64_t>> coupled;  // of each matrix
    for (int64_t i = 0; i < S.size(0); ++i) {
      coupled.push_back(coupled_rows(S.const_data_ptr<scalar_t>() + i * n * n, n));
    }
    const bool in_one_call =
        std::all_of(coupled.begin(), coupled.end(),
                    [n](const auto& rows) { return static_cast<int64_t>(rows.size()) == n; }) &&
        solve_by_lapack(S, values, vectors, /*attempt=*/1);
    for (int64_t i = 0; i < S.size(0); ++i) {
      if (in_one_call && is_eigensystem(S[i], values[i], vectors[i])) {
        continue;
      }
      if (static_cast<int64_t>(coupled[i].size()) < n) {
        solve_by_parts<scalar_t>(S[i], coupled[i], values[i], vectors[i]);
      } else if (in_one_call) {
        solve_again(S[i], values[i], vectors[i]);
      } else {
        solve_coupled(S[i], values[i], vectors[i]);
      }
    }
  });
}

int64_t eigh_retries() { return retries; }

void spoil_first_attempts(int attempts) { wrong_attempts = attempts; }

}  // namespace torchium::linalg::detail
