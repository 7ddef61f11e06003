// One layer in a K-FAC step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::optim::detail {

// How A (x) G is damped and inverted.
enum class DampingSplit {
  kPi,     // (G + sqrt(damping)/pi I)^-1 and (A + pi sqrt(damping) I)^-1 (Martens and Grosse 2015)
  kPlain,  // the same with pi = 1
  kExact,  // (A (x) G + damping I)^-1 through the eigenvectors of A and G
};

// A weight [o, c, ...] of `groups` channel groups as V [groups, o/groups, a], with a = numel/o plus
// one column for the bias. Factors and roots have one matrix per group. A factor [groups, n, n] may
// be stored as its diagonal, [groups, n], and then so are its sum and its root. With solver
// "inverse_free" the sums are stored like K and C.
struct KfacLayer {
  int64_t weight = 0;          // index in the parameters of the step
  int64_t bias = -1;           // -1: none
  bool has_spare_row = false;  // the last one of A is that of a bias that is not trained
  bool is_transposed = false;  // the weight is [in, out]

  // Of one step. Sums over the samples captured since the last one: A_sum [groups, a, a] of
  // a a^T, G_sum [groups, o/groups, o/groups] of g g^T; undefined: the factors stay.
  at::Tensor A_sum;
  at::Tensor G_sum;
  double A_scale = 1.0;  // A_scale A_sum = E[a a^T]
  double G_scale = 1.0;
  // EKFAC: sum of (U_G^T D U_A)^2 over samples, with D their gradients.
  at::Tensor moment_sum;
  double moment_scale = 1.0;
  bool inverse_due = false;
  // There are factors, but A_root and G_root were reset. They are computed first, from the old
  // factors, even if the step is skipped.
  bool inverse_lost = false;

  // Of one step.
  double damping = 1e-3;
  double stat_decay = 0.95;

  double floor = 1e-8;  // of the eigenvalues of A and G

  // Where several ranks share the step: the one that makes the inverses, and what this one does. A
  // rank that does not precondition the layer has no A_root, G_root and eigenvalues.
  int64_t owner = 0;
  bool inverts = true;
  bool preconditions = true;

  // solver "inverse_free": K, C, m_K and m_C instead of A, G, their roots and eigenvalues.
  double alpha1 = 0.5;
  at::Tensor K, C;      // [groups, ...] as in linalg/products/structured_matrix.h
  at::Tensor m_K, m_C;  // undefined: alpha1 is 0
  // Of the K and C that were squared (renew_squares()). A_root and G_root are their squares then,
  // not state, and A and G stand for the shapes.
  int64_t seen_versions = -1;

  // State, owned by the caller and changed in place.
  at::Tensor A;  // [groups, a, a], zero at first
  at::Tensor G;  // [groups, o/groups, o/groups], zero at first
  at::ScalarType root_dtype = at::kFloat;
  at::Tensor A_root;  // damped inverse, or eigenvectors in columns (kExact); the identity at first
  at::Tensor G_root;
  at::Tensor A_eigenvalues;   // kExact: [groups, a], floored; -1 until the first solve
  at::Tensor G_eigenvalues;   // kExact: [groups, o/groups]
  at::Tensor second_moments;  // EKFAC: [groups, o/groups, a], 1 at first; undefined: K-FAC
  at::Tensor moment_updates;  // EKFAC: 0-dim float32
  at::Tensor factor_updates;  // k: 0-dim float32
  at::Tensor root_failures;   // int32 [2]: consecutive failed solves of A and of G

  bool has_sums() const { return A_sum.defined(); }
  bool is_inverse_free() const { return K.defined(); }
  // Whether the factors have the dtype of their roots.
  bool has_state_dtype() const { return A.scalar_type() == root_dtype; }
  at::ScalarType factor_dtype() const { return (K.defined() ? K : A).scalar_type(); }
  // Weight and bias.
  std::vector<int64_t> params() const {
    return bias < 0 ? std::vector<int64_t>{weight} : std::vector<int64_t>{weight, bias};
  }
};

// The scale [C] (any shape with C elements) and the shift of a norm. Their Fisher matrix has one
// block for each channel (unit-wise: Osawa et al. 2019, arXiv 1811.12019, section 4.2).
struct UnitwiseLayer {
  int64_t weight = 0;  // index in the parameters of the step
  int64_t bias = -1;   // -1: none; if the blocks have room for it, only F[0, 0] counts

  // Of one step.
  at::Tensor block_sum;  // as the blocks; block_scale block_sum = E[..]; undefined: they stay
  double block_scale = 1.0;
  double damping = 1e-3;
  double stat_decay = 0.95;

  double floor = 1e-8;  // of the damping

  // State, owned by the caller and changed in place.
  at::Tensor blocks;          // [C, 2, 2], or [C, 1, 1] without a shift; zero at first
  at::Tensor factor_updates;  // k: 0-dim float32

  bool has_sums() const { return block_sum.defined(); }
  std::vector<int64_t> params() const {
    return bias < 0 ? std::vector<int64_t>{weight} : std::vector<int64_t>{weight, bias};
  }
};

}  // namespace torchium::optim::detail
