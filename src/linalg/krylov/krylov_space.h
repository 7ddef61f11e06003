// An orthonormal basis of a block Krylov space, and the operator's projection on it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::linalg::detail {

// Block Arnoldi's decomposition with full re-orthogonalisation:
//
//   A V = V H + F B
//
// V [n, m]: the basis, whose products with A are known; H = V^T A V [m, m]; F [n, b]: the block
// whose product is next, orthogonal to V; B [b, m], zero but for its last b columns until a
// restart. Nothing waits for the device.
class KrylovSpace {
 public:
  // Room for `capacity` columns of V. start: [n, b], of full rank.
  KrylovSpace(const at::Tensor& start, int64_t capacity, uint64_t seed);

  int64_t size() const { return size_; }
  bool is_full() const;

  at::Tensor operand() const;              // F
  void extend(const at::Tensor& product);  // A F: V becomes [V, F]

  // H above B: [m + b, m] float64, contiguous.
  at::Tensor projection() const;

  // The first m columns of V times U [m, columns]: [n, columns].
  at::Tensor combined(const at::Tensor& U) const;

  // V becomes V U for an orthonormal U [m, p] that spans an invariant subspace of H. The others
  // replace H and B.
  void restart(const at::Tensor& U, const at::Tensor& projection, const at::Tensor& coupling);

 private:
  void append(const at::Tensor& columns, int64_t known, const at::Tensor& projection);

  at::Tensor basis_;       // [capacity + 3 b, n]: the columns of V and F, then work
  at::Tensor projection_;  // [capacity + b, capacity] float64: H above B
  int64_t block_;
  int64_t size_ = 0;
  uint64_t seed_;
  uint64_t random_streams_ = 0;
};

}  // namespace torchium::linalg::detail
