#include "linalg/structured/iterative/column_krylov.h"

#include "linalg/common/operator_checks.h"
#include "linalg/common/precision.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

namespace torchium::linalg::detail {
namespace {

// x / length, zero where the length is.
at::Tensor normalized(const at::Tensor& x, const at::Tensor& length) {
  return at::where(length > 0, x / length.to(x.scalar_type()), at::zeros_like(x));
}

}  // namespace

ColumnKrylov::ColumnKrylov(Product product, const at::Tensor& B, int64_t steps)
    : product_(std::move(product)) {
  const int64_t n = B.size(0), m = B.size(1);
  bases_ = at::empty({m, steps + 1, n}, B.options());
  projections_ = at::zeros({m, steps + 1, steps}, B.options());
  const at::Tensor rows = B.mT();
  lengths_ = norms(rows, 1, /*keepdim=*/true).unsqueeze(2);
  bases_.select(1, 0).copy_(normalized(rows, lengths_.squeeze(2)));
}

void ColumnKrylov::step() {
  at::Tensor w = product_(bases_.select(1, steps_).mT()).mT().unsqueeze(2).clone();  // [m, n, 1]
  const at::Tensor length = norms(w, 1, /*keepdim=*/true);
  const at::Tensor V = bases_.narrow(1, 0, steps_ + 1);
  at::Tensor column = projections_.select(2, steps_);
  for (int pass = 0; pass < 2; ++pass) {
    const at::Tensor c = V.bmm(w);
    w.baddbmm_(V.mT(), c, /*beta=*/1, /*alpha=*/-1);
    column.narrow(1, 0, steps_ + 1).add_(c.squeeze(2));
  }
  const at::Tensor left = norms(w, 1, /*keepdim=*/true);
  const double noise = epsilon_of(w.scalar_type()) * std::sqrt(static_cast<double>(w.size(1)));
  const at::Tensor rest = at::where(left > noise * length, left, at::zeros_like(left));
  column.select(1, steps_ + 1).copy_(rest.flatten());
  bases_.select(1, ++steps_).copy_(normalized(w, rest).squeeze(2));
}

at::Tensor ColumnKrylov::projections() const {
  return projections_.narrow(1, 0, steps_ + 1).narrow(2, 0, steps_).to(at::kDouble);
}

at::Tensor ColumnKrylov::combine(const at::Tensor& coefficients) const {
  const at::Tensor V = bases_.narrow(1, 0, steps_);
  return V.mT().bmm(coefficients.to(V.options())).squeeze(2).mT();
}

}  // namespace torchium::linalg::detail
