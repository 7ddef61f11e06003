// What a K-FAC step knows about one layer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::optim::detail {

// Rule that makes the damped inverse of A (x) G.
enum class DampingSplit {
  kPi,     // (G + sqrt(damping)/pi I)^-1 and (A + pi sqrt(damping) I)^-1 (Martens and Grosse 2015)
  kPlain,  // the same with pi = 1
  kExact,  // (A (x) G + damping I)^-1 through the eigenvectors of A and G
};

// A weight [o, c, ...] of `groups` channel groups, seen as V [groups, o/groups, a] with a =
// numel/o, plus one column for the bias. All factors and roots are storage, one matrix a group. A
// factor [groups, n, n] may also be its diagonal alone, [groups, n]; its sum and root are then too.
struct KfacLayer {
  int64_t weight = 0;  // index in the parameters of the step
  int64_t bias = -1;   // -1: none; if A has a row for it, its gradient counts as zero
  // Sums over the samples captured since the last step: A_sum [groups, a, a] over all positions of
  // a a^T, G_sum [groups, o/groups, o/groups] of g g^T. Not used if samples = 0.
  at::Tensor A_sum;
  at::Tensor G_sum;
  int64_t samples = 0;  // N
  int64_t rows = 0;     // N T, T positions a sample
  bool inverse_due = false;
  // There are factors, but A_root and G_root are still those of a fresh state: they are made at
  // once of the factors as they are, also where the step is skipped.
  bool inverse_lost = false;
  double damping = 1e-3;
  double stat_decay = 0.95;
  double floor = 1e-8;  // of the eigenvalues of A and G

  // State, owned by the caller and changed in place.
  at::Tensor A;       // [groups, a, a], zero at first
  at::Tensor G;       // [groups, o/groups, o/groups], zero at first
  at::Tensor A_root;  // damped inverse, or eigenvectors in columns (kExact); the identity at first
  at::Tensor G_root;
  at::Tensor A_eigenvalues;   // kExact: [groups, a], floored; -1 until there are any. Else unused.
  at::Tensor G_eigenvalues;   // kExact: [groups, o/groups]
  at::Tensor factor_updates;  // k: 0-dim float32
  at::Tensor root_failures;   // int32 [2]: solves of A and of G that failed in a row
};

}  // namespace torchium::optim::detail
