#include "linalg/krylov/krylov_space.h"

#include "linalg/operators/operator_checks.h"
#include "linalg/operators/random_signs.h"
#include "linalg/precision.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

namespace torchium::linalg::detail {
namespace {

constexpr double kNoise = 0.1;

// W -= (V W^T)^T V for rows V and W. Returns the coefficients V W^T.
at::Tensor project_out_(at::Tensor W, const at::Tensor& V) {
  at::Tensor C = V.matmul(W.mT());
  W.addmm_(C.mT(), V, /*beta=*/1, /*alpha=*/-1);
  return C;
}

// Makes the first half W of the rows orthonormal and returns R with the former W = R^T W. A row of
// which no more than `least` is left is replaced by that of the second half, which loses its part
// in W, and is zero on the diagonal of R.
at::Tensor orthonormalise_(const at::Tensor& rows, const at::Tensor& least) {
  const int64_t count = rows.size(0) / 2;
  const at::Tensor W = rows.narrow(0, 0, count);
  const at::Tensor pairs = rows.view({2, count, -1});
  at::Tensor R = at::zeros({count, count}, rows.options());
  for (int64_t j = 0; j < count; ++j) {
    const at::Tensor pair = pairs.select(1, j);
    for (int pass = 0; pass < 2 && j > 0; ++pass) {
      const at::Tensor coefficients = project_out_(pair, W.narrow(0, 0, j));
      R.select(1, j).narrow(0, 0, j).add_(coefficients.select(1, 0));
    }
    const at::Tensor lengths = norms(pair, 1);
    const at::Tensor is_left = lengths[0] > least[j];
    W[j].copy_(at::where(is_left, pair[0], pair[1]))
        .div_(at::where(is_left, lengths[0], lengths[1]));
    R[j][j].copy_(lengths[0] * is_left);
  }
  return R;
}

}  // namespace

KrylovSpace::KrylovSpace(const at::Tensor& start, int64_t capacity, uint64_t seed)
    : basis_(at::empty({capacity + start.size(1), start.size(0)}, start.options())),
      projection_(at::zeros({capacity + start.size(1), capacity}, start.options())),
      noise_(at::full({start.size(1)}, kNoise, start.options().dtype(at::kDouble))),
      block_(start.size(1)),
      seed_(seed) {
  const at::Tensor rows = with_random_rows(start);
  const at::Tensor W = rows.narrow(0, 0, block_);
  orthonormalise_(rows, norms(W, 1) * epsilon_of(W.scalar_type()));
  orthonormalise_(rows, noise_);
  basis_.narrow(0, 0, block_).copy_(W);
}

// The columns X, and as many random ones, as rows.
at::Tensor KrylovSpace::with_random_rows(const at::Tensor& X) {
  const int64_t n = X.size(0);
  const at::Tensor random = random_signs(n, block_, ~seed_, random_streams_, X.options());
  random_streams_ += block_;
  return at::cat({X.mT(), random.mT()});
}

bool KrylovSpace::is_full() const { return size_ + block_ > projection_.size(1); }

at::Tensor KrylovSpace::operand() const { return basis_.narrow(0, size_, block_).mT(); }

at::Tensor KrylovSpace::projection() const {
  return projection_.narrow(0, 0, size_).narrow(1, 0, size_);
}

at::Tensor KrylovSpace::coupling() const {
  return projection_.narrow(0, size_, block_).narrow(1, 0, size_);
}

at::Tensor KrylovSpace::combined(const at::Tensor& U) const {
  return U.mT().matmul(basis_.narrow(0, 0, size_)).mT();
}

// A F = V C1 + Q R, and Q = V C2 + Q' R2, because the first projection leaves rounding errors:
// A F = V (C1 + C2 R) + Q' R2 R. Twice is enough (Giraud et al. 2005), unless the first projection
// left nothing but rounding errors: then the second leaves little of Q. The space is invariant, and
// random vectors continue it, which are projected beside.
void KrylovSpace::extend(const at::Tensor& product) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;  // half the time of small operations
  const int64_t known = size_ + block_;
  const at::Tensor V = basis_.narrow(0, 0, known);
  const at::Tensor rows = with_random_rows(product);
  const at::Tensor W = rows.narrow(0, 0, block_);
  const at::Tensor lengths = norms(W, 1);
  const at::Tensor C1 = project_out_(rows, V).narrow(1, 0, block_);
  const at::Tensor R = orthonormalise_(rows, lengths * epsilon_of(W.scalar_type()));
  const at::Tensor C2 = project_out_(rows, V).narrow(1, 0, block_);
  const at::Tensor R2 = orthonormalise_(rows, noise_);
  const at::Tensor columns = projection_.narrow(1, size_, block_);
  columns.narrow(0, 0, known).copy_(at::addmm(C1, C2, R));
  columns.narrow(0, known, block_).copy_(R2.matmul(R));
  basis_.narrow(0, known, block_).copy_(W);
  size_ = known;
}

void KrylovSpace::restart(const at::Tensor& U, const at::Tensor& projection,
                          const at::Tensor& coupling) {
  const int64_t kept = U.size(1);
  const at::Tensor F = basis_.narrow(0, size_, block_).clone();
  const at::Tensor V = U.to(basis_.options()).mT().matmul(basis_.narrow(0, 0, size_));
  basis_.narrow(0, 0, kept).copy_(V);
  basis_.narrow(0, kept, block_).copy_(F);
  projection_.zero_();
  const at::Tensor columns = projection_.narrow(1, 0, kept);
  columns.narrow(0, 0, kept).copy_(projection);
  columns.narrow(0, kept, block_).copy_(coupling);
  size_ = kept;
}

}  // namespace torchium::linalg::detail
