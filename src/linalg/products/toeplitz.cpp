#include "linalg/products/toeplitz.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>

namespace torchium::linalg::detail {
namespace {

// The least even length without prime factors above 5 in which convolutions of n numbers with n
// do not wrap around.
int64_t transform_length(int64_t n) {
  for (int64_t length = std::max<int64_t>(2, 2 * n);; length += 2) {
    int64_t rest = length;
    for (const int64_t prime : {2, 3, 5}) {
      while (rest % prime == 0) {
        rest /= prime;
      }
    }
    if (rest == 1) {
      return length;
    }
  }
}

// Transforms of columns [batch, n, columns] with zeros behind them.
class Transforms {
 public:
  explicit Transforms(int64_t n) : n_(n), length_(transform_length(n)) {}

  at::Tensor of(const at::Tensor& columns) const { return at::fft_rfft(columns, length_, 1); }
  // The first n numbers.
  at::Tensor inverse(const at::Tensor& spectrum) const {
    return at::fft_irfft(spectrum, length_, 1).narrow(1, 0, n_);
  }

 private:
  int64_t n_, length_;
};

// P(S) from the sums over the diagonals of S, [batch, n, 1], beginning with the main one.
at::Tensor projected(const at::Tensor& sums) {
  const int64_t n = sums.size(1);
  at::Tensor weights = 2.0 / at::arange(n, 0, -1, sums.options());  // n - j entries, twice
  weights.select(0, 0).mul_(0.5);
  return sums * weights.view({-1, 1});
}

}  // namespace

at::Tensor toeplitz_multiply(const at::Tensor& M, const at::Tensor& X, bool transposed) {
  const Transforms transforms(M.size(1));
  const at::Tensor m = transforms.of(M);
  return transforms.inverse(transforms.of(X) * (transposed ? m.conj() : m));
}

// Diagonal j of M^T M has the sum: sum over u of m_u m_{u + j} (n - j - u).
at::Tensor toeplitz_gram(const at::Tensor& M) {
  const Transforms transforms(M.size(1));
  const at::Tensor counts = at::arange(M.size(1), 0, -1, M.options()).view({-1, 1});
  return projected(transforms.inverse(transforms.of(M).conj() * transforms.of(M * counts)));
}

// Diagonal j of y y^T has the sum: sum over i of y_i y_{i + j}, whose transform is |y^|^2.
at::Tensor toeplitz_moment(const at::Tensor& X, const at::Tensor& M) {
  const Transforms transforms(X.size(1));
  // There and back also without M: the same bits as with an identity.
  const at::Tensor Y = M.defined() ? toeplitz_multiply(M, X, /*transposed=*/true)
                                   : transforms.inverse(transforms.of(X));
  const at::Tensor power = at::view_as_real(transforms.of(Y)).square().sum({2, 3});
  return projected(transforms.inverse(power.unsqueeze(-1)));
}

// The diagonals of S are those of the larger matrix, which have more entries.
at::Tensor toeplitz_padded(const at::Tensor& projection, int64_t n) {
  const int64_t missing = n - projection.size(1);
  const at::Tensor padded = at::constant_pad_nd(projection, {0, 0, 0, missing});
  const at::Tensor counts = at::arange(n, 0, -1, projection.options()).view({-1, 1});
  return padded * ((counts - static_cast<double>(missing)) / counts);
}

}  // namespace torchium::linalg::detail
