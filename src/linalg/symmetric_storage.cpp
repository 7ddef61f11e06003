#include "linalg/symmetric_storage.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace torchium::linalg::detail {
namespace {

constexpr int64_t kTile = 32;
constexpr int64_t kGrain = 65536;  // elements a thread should have to itself at least

// Calls body(matrix, first_row, last_row) for bands of kTile rows of every matrix, in parallel.
template <typename Body>
void for_each_band(int64_t matrices, int64_t n, const Body& body) {
  const int64_t bands = (n + kTile - 1) / kTile;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, n * std::min(n, kTile)));
  at::parallel_for(0, matrices * bands, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % bands * kTile;
      body(i / bands, first, std::min(n, first + kTile));
    }
  });
}

// Copies the part of the strict lower triangle in rows [row, row_end) and columns [column,
// column_end) onto the upper one, in squares that fit the first cache.
template <typename scalar_t>
void mirror_block(scalar_t* C, int64_t stride, int64_t row, int64_t row_end, int64_t column,
                  int64_t column_end) {
  for (int64_t top = row; top < row_end; top += kTile) {
    for (int64_t left = column; left < std::min(column_end, top + kTile); left += kTile) {
      const int64_t bottom = std::min(row_end, top + kTile);
      const int64_t right = std::min(column_end, left + kTile);
      for (int64_t j = left; j < right; ++j) {
        for (int64_t i = std::max(top, j + 1); i < bottom; ++i) {
          C[j * stride + i] = C[i * stride + j];
        }
      }
    }
  }
}

// The larger one, or NaN if either is.
template <typename scalar_t>
scalar_t larger_or_nan(scalar_t most, scalar_t value) {
  return value > most || std::isnan(value) ? value : most;
}

// Writes (A + A^T) / 2 of every matrix to S (contiguous) and max |A_ij| to `largest`, NaN if A
// holds one. Halves are added, because a sum of two entries may overflow.
template <typename scalar_t>
void symmetric_part_cpu(const at::TensorAccessor<const scalar_t, 3>& A, scalar_t* S,
                        double* largest) {
  const int64_t n = A.size(1);
  const int64_t bands = (n + kTile - 1) / kTile;
  std::vector<double> band_largest(A.size(0) * bands);
  for_each_band(A.size(0), n, [&](int64_t matrix, int64_t first_row, int64_t last_row) {
    const auto source = A[matrix];
    scalar_t* target = S + matrix * n * n;
    scalar_t most = 0;
    for (int64_t first_column = 0; first_column <= first_row; first_column += kTile) {
      const int64_t last_column = std::min(n, first_column + kTile);
      for (int64_t i = first_row; i < last_row; ++i) {
        for (int64_t j = first_column; j < std::min(last_column, i + 1); ++j) {
          const scalar_t lower = source[i][j];
          const scalar_t upper = source[j][i];
          const scalar_t mean = lower / 2 + upper / 2;
          target[i * n + j] = mean;
          target[j * n + i] = mean;
          for (const scalar_t entry : {lower, upper}) {
            most = larger_or_nan(most, std::abs(entry));
          }
        }
      }
    }
    band_largest[matrix * bands + first_row / kTile] = static_cast<double>(most);
  });
  for (int64_t matrix = 0; matrix < A.size(0); ++matrix) {
    double most = 0;
    for (int64_t band = 0; band < bands; ++band) {
      const double value = band_largest[matrix * bands + band];
      most = larger_or_nan(most, value);
    }
    largest[matrix] = most;
  }
}

// (A + A^T) / 2 and max |A_ij| [N] float64.
std::pair<at::Tensor, at::Tensor> symmetric_part(const at::Tensor& A) {
  if (!A.is_cpu()) {
    const auto [low, high] = A.flatten(1).aminmax(1);
    const at::Tensor half = A * 0.5;
    return {half + half.mT(), at::maximum(high, low.neg()).to(at::kDouble)};
  }
  at::Tensor S = at::empty(A.sizes(), A.options());
  at::Tensor largest = at::empty({A.size(0)}, A.options().dtype(at::kDouble));
  AT_DISPATCH_FLOATING_TYPES(A.scalar_type(), "symmetric_part", [&] {
    symmetric_part_cpu<scalar_t>(A.accessor<const scalar_t, 3>(), S.mutable_data_ptr<scalar_t>(),
                                 largest.mutable_data_ptr<double>());
  });
  return {S, largest};
}

// 2^exponent as float64, exact: the biased exponent is written into the bits.
at::Tensor power_of_two(const at::Tensor& exponent) {
  constexpr int64_t kBias = std::numeric_limits<double>::max_exponent - 1;
  constexpr int64_t kFractionBits = std::numeric_limits<double>::digits - 1;
  return at::bitwise_left_shift(exponent.to(at::kLong) + kBias, kFractionBits).view(at::kDouble);
}

// 1 while squares and their sums are far inside the range of the dtype, else the power of two that
// brings the magnitude to [1/2, 1), as far as there is one.
at::Tensor scale_for(const at::Tensor& magnitude, at::ScalarType dtype) {
  const int64_t limit = (dtype == at::kFloat ? std::numeric_limits<float>::max_exponent
                                             : std::numeric_limits<double>::max_exponent) -
                        2;
  const at::Tensor exponent = std::get<1>(at::frexp(magnitude));
  const at::Tensor moderate = exponent.abs() <= limit / 4;
  return power_of_two(exponent.neg().clamp_(-limit, limit).masked_fill_(moderate, 0));
}

}  // namespace

void mirror_lower_(at::Tensor& C) {
  const int64_t n = C.size(-1);
  if (!C.is_cpu()) {
    C.copy_(C.tril() + C.tril(-1).mT());
    return;
  }
  TORCH_INTERNAL_ASSERT(n <= 1 || C.stride(2) == 1);
  AT_DISPATCH_FLOATING_TYPES(C.scalar_type(), "mirror_lower_", [&] {
    scalar_t* data = C.mutable_data_ptr<scalar_t>();
    const int64_t between = C.stride(0);
    const int64_t stride = C.stride(1);
    for_each_band(C.size(0), n, [=](int64_t matrix, int64_t first_row, int64_t last_row) {
      mirror_block(data + matrix * between, stride, first_row, last_row, 0, last_row);
    });
  });
}

void mirror_lower_tile_(at::Tensor& C, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(C.stride(1) == 1);
  AT_DISPATCH_FLOATING_TYPES(C.scalar_type(), "mirror_lower_tile_", [&] {
    mirror_block(C.mutable_data_ptr<scalar_t>(), C.stride(0), row, row + rows, column,
                 column + columns);
  });
}

Normalized normalize_symmetric(const at::Tensor& A, double eps) {
  if (A.numel() == 0) {
    return {A.clone(at::MemoryFormat::Contiguous),
            at::ones({A.size(0)}, A.options().dtype(at::kDouble)),
            at::ones({A.size(0)}, A.options().dtype(at::kBool))};
  }
  auto [matrix, largest] = symmetric_part(A);
  const at::Tensor finite = largest.isfinite();
  const at::Tensor scale =
      scale_for(at::where(finite, largest, 0.5).clamp_min_(eps), A.scalar_type());
  const auto on_host = [&](const at::Tensor& flag) { return A.is_cpu() && flag.item<bool>(); };
  if (!on_host((scale == 1).all())) {
    matrix.mul_(scale.to(A.scalar_type()).view({-1, 1, 1}));
  }
  if (!on_host(finite.all())) {
    matrix = at::where(finite.view({-1, 1, 1}), matrix, at::eye(A.size(-1), A.options()));
  }
  return {matrix, scale, finite};
}

}  // namespace torchium::linalg::detail
