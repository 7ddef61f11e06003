#include "linalg/symmetric_storage.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>

namespace torchium::linalg::detail {
namespace {

constexpr int64_t kTile = 32;
constexpr int64_t kGrain = 16384;  // elements a thread should have to itself at least

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

template <typename scalar_t>
void mirror_lower_cpu(scalar_t* data, int64_t matrices, int64_t n, int64_t batch_stride,
                      int64_t row_stride) {
  for_each_band(matrices, n, [=](int64_t matrix, int64_t first_row, int64_t last_row) {
    scalar_t* C = data + matrix * batch_stride;
    for (int64_t first_column = first_row; first_column < n; first_column += kTile) {
      const int64_t last_column = std::min(n, first_column + kTile);
      for (int64_t i = first_row; i < last_row; ++i) {
        for (int64_t j = std::max(first_column, i + 1); j < last_column; ++j) {
          C[i * row_stride + j] = C[j * row_stride + i];
        }
      }
    }
  });
}

// 2^exponent as float64, exact: the biased exponent is written into the bits.
at::Tensor power_of_two(const at::Tensor& exponent) {
  constexpr int64_t kBias = std::numeric_limits<double>::max_exponent - 1;
  constexpr int64_t kFractionBits = std::numeric_limits<double>::digits - 1;
  return at::bitwise_left_shift(exponent.to(at::kLong) + kBias, kFractionBits).view(at::kDouble);
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
    mirror_lower_cpu(C.mutable_data_ptr<scalar_t>(), C.size(0), n, C.stride(0), C.stride(1));
  });
}

Normalized normalize_symmetric(const at::Tensor& A, double eps) {
  if (A.numel() == 0) {
    return {A.clone(at::MemoryFormat::Contiguous),
            at::ones({A.size(0)}, A.options().dtype(at::kDouble)),
            at::ones({A.size(0)}, A.options().dtype(at::kBool))};
  }
  const auto [low, high] = A.flatten(1).aminmax(1);
  const at::Tensor largest = at::maximum(high, low.neg());  // NaN if there is one
  const at::Tensor finite = largest.isfinite();
  const int64_t limit = A.scalar_type() == at::kFloat
                            ? std::numeric_limits<float>::max_exponent - 2
                            : std::numeric_limits<double>::max_exponent - 2;
  const at::Tensor exponent =
      std::get<1>(at::frexp(at::where(finite, largest, 0.5).to(at::kDouble).clamp_min(eps)));
  const at::Tensor scale = power_of_two(exponent.neg().clamp(-limit, limit));
  at::Tensor matrix = A * scale.to(A.scalar_type()).view({-1, 1, 1});
  matrix = (matrix + matrix.mT()).mul_(0.5);
  const at::Tensor identity = at::eye(A.size(-1), A.options());
  matrix = at::where(finite.view({-1, 1, 1}), matrix, identity);
  return {matrix, scale, finite};
}

}  // namespace torchium::linalg::detail
