// Krylov spaces of several columns, each by itself, with common products.
#pragma once

#include <torchium/linalg/linear_operator.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace torchium::linalg::detail {

// A V_s = V_(s+1) H for the orthonormal bases V_s of s columns, by Arnoldi's method with full
// re-orthogonalisation. A space that is invariant continues with zero vectors.
class ColumnKrylov {
 public:
  using Product = std::function<at::Tensor(const at::Tensor&)>;

  // Starts from the columns of B [n, m] and takes up to `steps` steps.
  ColumnKrylov(Product product, const at::Tensor& B, int64_t steps);

  void step();
  int64_t steps() const { return steps_; }
  // [m, 1, 1] float64: |b|
  const at::Tensor& lengths() const { return lengths_; }
  // [m, steps + 1, steps] float64
  at::Tensor projections() const;
  // V y: [n, m] for coefficients y [m, steps, 1].
  at::Tensor combine(const at::Tensor& coefficients) const;

 private:
  Product product_;
  at::Tensor lengths_;
  at::Tensor bases_;        // [m, most steps + 1, n]
  at::Tensor projections_;  // [m, most steps + 1, most steps]
  int64_t steps_ = 0;
};

}  // namespace torchium::linalg::detail
