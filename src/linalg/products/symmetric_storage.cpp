#include "linalg/products/symmetric_storage.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <c10/util/bit_cast.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

namespace torchium::linalg::detail {
namespace {

constexpr int64_t kTile = 32;
constexpr int64_t kSquare = 4;
constexpr int64_t kGrain = 16384;  // least number of elements per thread

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

// Copies the square C[top.., left..], below the diagonal, onto its mirror image. Its size is a
// compile-time constant, so it is transposed in registers.
template <typename scalar_t>
void mirror_square(scalar_t* C, int64_t stride, int64_t top, int64_t left) {
  std::array<std::array<scalar_t, kSquare>, kSquare> transposed;
  for (int64_t i = 0; i < kSquare; ++i) {
    for (int64_t j = 0; j < kSquare; ++j) {
      transposed[j][i] = C[(top + i) * stride + left + j];
    }
  }
  for (int64_t j = 0; j < kSquare; ++j) {
    for (int64_t i = 0; i < kSquare; ++i) {
      C[(left + j) * stride + top + i] = transposed[j][i];
    }
  }
}

// Copies the part of the strict lower triangle in rows [row, row_end) and columns [column,
// column_end) onto the upper one, square by square.
template <typename scalar_t>
void mirror_squares(scalar_t* C, int64_t stride, int64_t row, int64_t row_end, int64_t column,
                    int64_t column_end) {
  for (int64_t top = row; top < row_end; top += kSquare) {
    const int64_t bottom = std::min(row_end, top + kSquare);
    for (int64_t left = column; left < std::min(column_end, bottom); left += kSquare) {
      const int64_t right = std::min(column_end, left + kSquare);
      if (right <= top && bottom - top == kSquare && right - left == kSquare) {
        mirror_square(C, stride, top, left);
        continue;
      }
      for (int64_t j = left; j < right; ++j) {
        for (int64_t i = std::max(top, j + 1); i < bottom; ++i) {
          C[j * stride + i] = C[i * stride + j];
        }
      }
    }
  }
}

// The same, in blocks that fit in the L1 cache.
template <typename scalar_t>
void mirror_block(scalar_t* C, int64_t stride, int64_t row, int64_t row_end, int64_t column,
                  int64_t column_end) {
  constexpr int64_t kBlock = 16;
  for (int64_t top = row; top < row_end; top += kBlock) {
    const int64_t bottom = std::min(row_end, top + kBlock);
    for (int64_t left = column; left < std::min(column_end, bottom); left += kBlock) {
      mirror_squares(C, stride, top, bottom, left, std::min(column_end, left + kBlock));
    }
  }
}

// |value| as an integer: these order like the magnitudes, with Inf above all numbers and NaN above
// Inf.
template <typename scalar_t>
auto magnitude_bits(scalar_t value) {
  using Bits = std::conditional_t<sizeof(scalar_t) == 4, int32_t, int64_t>;
  return c10::bit_cast<Bits>(value) & std::numeric_limits<Bits>::max();
}

// Writes (A + A^T) / 2 of every matrix to S (contiguous) and max |A_ij| to `largest`, NaN if A
// holds one. Computed as A_ij / 2 + A_ji / 2, because a sum of two entries may overflow.
template <typename scalar_t>
void symmetric_part_cpu(const at::Tensor& A, scalar_t* S, double* largest) {
  using Bits = decltype(magnitude_bits(scalar_t{}));
  const scalar_t* data = A.const_data_ptr<scalar_t>();
  const int64_t n = A.size(1);
  const int64_t bands = (n + kTile - 1) / kTile;
  std::vector<Bits> most(A.size(0) * bands);  // of each band
  for_each_band(A.size(0), n, [&](int64_t matrix, int64_t top, int64_t bottom) {
    const scalar_t* source = data + matrix * n * n;
    scalar_t* target = S + matrix * n * n;
    // Matrices are read and written only by rows and transposed here, in the L1 cache: the columns
    // of a matrix whose rows are a power of two apart share a few cache lines.
    std::array<std::array<scalar_t, kTile>, kTile> upper;
    Bits band_most = 0;
    for (int64_t left = 0; left < bottom; left += kTile) {
      const int64_t rows = bottom - top;
      const int64_t columns = std::min(kTile, n - left);
      for (int64_t j = 0; j < columns; ++j) {
        for (int64_t i = 0; i < rows; ++i) {
          const scalar_t entry = source[(left + j) * n + top + i];
          band_most = std::max(band_most, magnitude_bits(entry));
          upper[j][i] = entry;
        }
      }
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) {
          const scalar_t entry = source[(top + i) * n + left + j];
          band_most = std::max(band_most, magnitude_bits(entry));
          upper[j][i] = entry / 2 + upper[j][i] / 2;
          target[(top + i) * n + left + j] = upper[j][i];
        }
      }
      for (int64_t j = 0; j < columns; ++j) {
        std::copy(upper[j].begin(), upper[j].begin() + rows, target + (left + j) * n + top);
      }
    }
    most[matrix * bands + top / kTile] = band_most;
  });
  for (int64_t matrix = 0; matrix < A.size(0); ++matrix) {
    const auto first = most.begin() + matrix * bands;
    largest[matrix] = c10::bit_cast<scalar_t>(*std::max_element(first, first + bands));
  }
}

// Exponents up to this are those of powers of two with a normal reciprocal.
int64_t largest_exponent(at::ScalarType dtype) {
  return (dtype == at::kFloat ? std::numeric_limits<float>::max_exponent
                              : std::numeric_limits<double>::max_exponent) -
         2;
}

// 1 while squares and their sums are far inside the range of the dtype, otherwise the power of two
// that brings the magnitude to [1/2, 1), or the closest one available.
double scale_for(double magnitude, at::ScalarType dtype) {
  const int64_t limit = largest_exponent(dtype);
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const bool moderate = std::abs(exponent) <= limit / 4;
  return moderate
             ? 1.0
             : std::ldexp(1.0, static_cast<int>(std::clamp<int64_t>(-exponent, -limit, limit)));
}

// 2^exponent as float64, exact: the biased exponent is written into the bits.
at::Tensor power_of_two(const at::Tensor& exponent) {
  constexpr int64_t kBias = std::numeric_limits<double>::max_exponent - 1;
  constexpr int64_t kFractionBits = std::numeric_limits<double>::digits - 1;
  return at::bitwise_left_shift(exponent.to(at::kLong) + kBias, kFractionBits).view(at::kDouble);
}

at::Tensor scale_for(const at::Tensor& magnitude, at::ScalarType dtype) {
  const int64_t limit = largest_exponent(dtype);
  const at::Tensor exponent = std::get<1>(at::frexp(magnitude));
  const at::Tensor moderate = exponent.abs() <= limit / 4;
  return power_of_two(exponent.neg().clamp_(-limit, limit).masked_fill_(moderate, 0));
}

void set_identity_where_not_finite(Normalized& input) {
  const at::Tensor identity = at::eye(input.matrix.size(-1), input.matrix.options());
  input.matrix = at::where(input.finite.view({-1, 1, 1}), input.matrix, identity);
}

void multiply_by_scale(Normalized& input) {
  input.matrix.mul_(input.scale.to(input.matrix.scalar_type()).view({-1, 1, 1}));
}

Normalized normalize_on_device(const at::Tensor& A, double eps) {
  const auto [low, high] = A.flatten(1).aminmax(1);
  const at::Tensor largest = at::maximum(high, low.neg()).to(at::kDouble);
  const at::Tensor half = A * 0.5;
  const at::Tensor finite = largest.isfinite();
  const at::Tensor magnitude = at::where(finite, largest, 0.5).clamp_min_(eps);
  Normalized input{half + half.mT(), scale_for(magnitude, A.scalar_type()), finite};
  multiply_by_scale(input);
  set_identity_where_not_finite(input);
  return input;
}

// Without tensor operations per number: for one small matrix those would take as long as its
// eigenvalues.
Normalized normalize_on_host(const at::Tensor& A, double eps) {
  Normalized input{at::empty(A.sizes(), A.options()),
                   at::empty({A.size(0)}, A.options().dtype(at::kDouble)),
                   at::empty({A.size(0)}, A.options().dtype(at::kBool))};
  double* scale = input.scale.mutable_data_ptr<double>();  // max |A_ij| until it is replaced below
  AT_DISPATCH_FLOATING_TYPES(A.scalar_type(), "normalize_on_host", [&] {
    symmetric_part_cpu(A.contiguous(), input.matrix.mutable_data_ptr<scalar_t>(), scale);
  });
  bool* finite = input.finite.mutable_data_ptr<bool>();
  bool all_finite = true;
  bool all_moderate = true;
  for (int64_t i = 0; i < A.size(0); ++i) {
    finite[i] = std::isfinite(scale[i]);
    scale[i] = scale_for(std::max(finite[i] ? scale[i] : 0.5, eps), A.scalar_type());
    all_finite = all_finite && finite[i];
    all_moderate = all_moderate && scale[i] == 1.0;
  }
  if (!all_moderate) {
    multiply_by_scale(input);
  }
  if (!all_finite) {
    set_identity_where_not_finite(input);
  }
  return input;
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
  return A.is_cpu() ? normalize_on_host(A, eps) : normalize_on_device(A, eps);
}

}  // namespace torchium::linalg::detail
