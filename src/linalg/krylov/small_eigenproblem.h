// The eigenpairs of the projection of an operator on a Krylov space, sorted by what is wanted, and
// the part of the space with which to restart. Everything is float64 on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace torchium::linalg::detail {

struct RitzPairs {
  at::Tensor values;   // [m], the most wanted first; complex for a general projection
  at::Tensor vectors;  // [m, m], columns of norm 1
  // [min(k, m)]: |A V x - theta V x| = |[H x - theta x; B x]|. H x is not theta x where a symmetric
  // problem was asked for and H is not quite symmetric.
  at::Tensor residuals;
};

// H [m, m], B [b, m]: see KrylovSpace. k: pairs that are wanted. which: "LA", "SA", "LM", "LR",
// "SR" or "LI".
RitzPairs ritz_pairs(const at::Tensor& H, const at::Tensor& B, int64_t k, bool symmetric,
                     const std::string& which);

struct RestartSpace {
  at::Tensor basis;       // [m, p], orthonormal
  at::Tensor projection;  // [p, p]
  at::Tensor coupling;    // [b, p]
  double error = 0.0;     // |H U - U U^T H U|: by how much U is not invariant
};

// The space of the `least` most wanted pairs; one more where it would separate a complex pair.
RestartSpace restart_space(const RitzPairs& pairs, const at::Tensor& H, const at::Tensor& B,
                           int64_t least);

}  // namespace torchium::linalg::detail
