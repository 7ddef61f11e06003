#include "linalg/krylov/krylov_space.h"

#include "linalg/common/random_signs.h"
#include "linalg/krylov/block_gram_schmidt.h"
#include "linalg/products/batched_products.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

namespace torchium::linalg::detail {

KrylovSpace::KrylovSpace(const at::Tensor& start, int64_t capacity, uint64_t seed)
    : basis_(at::empty({capacity + 3 * start.size(1), start.size(0)}, start.options())),
      projection_(
          at::zeros({capacity + start.size(1), capacity}, start.options().dtype(at::kDouble))),
      block_(start.size(1)),
      seed_(seed) {
  append(start, 0, {});
}

// Makes the columns orthonormal, also to the first `known` ones, and puts them behind these. If the
// space is invariant, random vectors continue it.
void KrylovSpace::append(const at::Tensor& columns, int64_t known, const at::Tensor& projection) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;  // half the time of small operations
  basis_.narrow(0, known, block_).copy_(columns.mT());
  random_signs_(basis_.narrow(0, known + block_, block_), ~seed_, random_streams_);
  random_streams_ += block_;
  orthogonalise_block(basis_.narrow(0, 0, known + 2 * block_), known, projection);
}

bool KrylovSpace::is_full() const { return size_ + block_ > projection_.size(1); }

at::Tensor KrylovSpace::operand() const { return basis_.narrow(0, size_, block_).mT(); }

at::Tensor KrylovSpace::projection() const {
  return projection_.narrow(0, 0, size_ + block_).narrow(1, 0, size_).contiguous();
}

at::Tensor KrylovSpace::combined(const at::Tensor& U) const {
  const at::Tensor basis = basis_.narrow(0, 0, U.size(0));
#ifdef TORCHIUM_WITH_CUDA
  if (U.is_cuda()) {  // by cuBLAS itself: torch's operator takes the host longer than the device
    at::Tensor rows = at::empty({1, U.size(1), basis.size(1)}, basis.options());
    multiply_strided_out(rows, U.contiguous().mT().unsqueeze(0), basis.unsqueeze(0),
                         MatmulPrecision::kHighest);
    return rows[0].mT();
  }
#endif
  return U.mT().matmul(basis).mT();
}

void KrylovSpace::extend(const at::Tensor& product) {
  const int64_t known = size_ + block_;
  append(product, known, projection_.narrow(0, 0, known + block_).narrow(1, size_, block_));
  size_ = known;
}

void KrylovSpace::restart(const at::Tensor& U, const at::Tensor& projection,
                          const at::Tensor& coupling) {
  const int64_t kept = U.size(1);
  const at::Tensor F = basis_.narrow(0, size_, block_).clone();
  basis_.narrow(0, 0, kept).copy_(combined(U.to(basis_.options())).mT());
  basis_.narrow(0, kept, block_).copy_(F);
  projection_.zero_();
  const at::Tensor columns = projection_.narrow(1, 0, kept);
  columns.narrow(0, 0, kept).copy_(projection);
  columns.narrow(0, kept, block_).copy_(coupling);
  size_ = kept;
}

}  // namespace torchium::linalg::detail
