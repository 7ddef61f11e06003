#include "optim/natural_gradient/natural_gradient_direction.h"

#include "linalg/common/operand_checks.h"
#include "linalg/common/precision.h"
#include "optim/natural_gradient/nystrom.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {
namespace {

// A bound of |r|^2 where r is nothing but the rounding of v.
at::Tensor largest_square_of_rounding(const ParameterVector& v,
                                      const std::vector<double>& roundings) {
  const auto squares = dots(v, v).unbind();
  at::Tensor result;
  for (size_t s = 0; s < v.size(); ++s) {  // without a copy of the roundings to the device
    const at::Tensor term = squares[s] * (roundings[s] * roundings[s]);
    result = s == 0 ? term : result + term;
  }
  return result;
}

// Lambda^-1 x
ParameterVector divided_by_dampings(const std::vector<double>& dampings, const ParameterVector& x) {
  ParameterVector result;
  for (size_t p = 0; p < x.size(); ++p) {
    result.push_back(x[p] / dampings[p]);
  }
  return result;
}

}  // namespace

GradientSplit split_gradient(const SegmentedJacobian& J, const ParameterVector& v,
                             const at::Tensor& a, const std::vector<double>& roundings) {
  ParameterVector u = J.transpose_product(a / static_cast<double>(J.samples()));
  const at::Tensor uu = dot(u, u);
  const at::Tensor c = at::where(uu == 0, 0.0, dot(v, u) / uu);
  J.equalize_({c});
  const at::Tensor y = a * c;
  for (size_t p = 0; p < v.size(); ++p) {
    at::addcmul_out(u[p], v[p], u[p], c.neg().to(u[p].scalar_type()));
  }
  ParameterVector& r = u;
  const at::Tensor negligible = dot(r, r) <= largest_square_of_rounding(v, roundings);
  if (negligible.is_cpu()) {
    const bool counts = J.any(!negligible.item<bool>());
    return {y, counts ? std::move(r) : ParameterVector()};
  }
  for (auto& tensor : r) {  // the host must not ask whether it is zero
    tensor.masked_fill_(negligible, 0);
  }
  return {y, std::move(r)};
}

// With v = J^T y / n + r, x = mu d_prev + Lambda^-1 r and S = J Lambda^-1 J^T / n + I it is
//   d = x + Lambda^-1 J^T w,  w = S^-1 (y - J x) / n.
// With r for all of v (y = 0) the two terms would cancel, and lose their digits.
ParameterVector gram_direction(const SegmentedJacobian& J, const std::vector<double>& dampings,
                               const GradientSplit& v, const ScaledVector& previous,
                               const at::Tensor& L) {
  ScaledVector x = previous;
  if (!v.r.empty()) {
    x = {divided_by_dampings(dampings, v.r), std::vector<double>(v.r.size(), 1.0)};
    add_(x.x, previous);
  }
  at::Tensor y = v.y;
  if (!x.x.empty()) {
    const at::Tensor known = J.product(x.x, x.scales);
    y = y.defined() ? y - known : known.neg();
  }
  const double n = static_cast<double>(J.samples());
  const at::Tensor w = at::cholesky_solve(y.unsqueeze(1), L).squeeze(1).div_(n);
  std::vector<double> inverse_dampings;
  for (const double damping : dampings) {
    inverse_dampings.push_back(1.0 / damping);
  }
  ParameterVector d = J.transpose_product(w, inverse_dampings);
  add_(d, x);
  return d;
}

ConjugateGradientsResult cg_direction(const SegmentedJacobian& J,
                                      const std::vector<double>& dampings, const at::Tensor& W,
                                      const ConjugateGradientsRule& rule, ParameterVector v,
                                      const ScaledVector& previous) {
  const double n = static_cast<double>(J.samples());
  const auto damped_fisher = [&](const ParameterVector& x) {
    ParameterVector result = J.transpose_product(J.product(x).div_(n));
    add_(result, {x, dampings});
    return result;
  };
  const auto precondition = [&](const ParameterVector& x) {
    return preconditioned(W, J.segments, dampings, x);
  };
  if (!previous.x.empty()) {
    const ParameterVector known =
        J.transpose_product(J.product(previous.x, previous.scales).div_(n));
    for (size_t p = 0; p < v.size(); ++p) {
      v[p] = v[p] - known[p];
    }
  }
  ConjugateGradientsResult result = conjugate_gradients(damped_fisher, precondition, v, rule,
                                                        [&](bool own) { return J.any(own); });
  add_(result.x, previous);
  return result;
}

ConjugateGradientsRule conjugate_gradients_rule(at::TensorList params, int64_t rows, double eps) {
  double floor = 0.0;
  int64_t elements = 0;
  for (const at::Tensor& param : params) {
    floor = std::max(floor, linalg::detail::epsilon_of(linalg::detail::compute_dtype(param)));
    elements += param.numel();
  }
  // As many iterations as F has non-zero eigenvalues, and one, would do without rounding.
  const int64_t rank = std::min(elements, rows);
  return {std::max(eps, 4 * floor), std::min<int64_t>(4 * rank + 20, 1000)};
}

}  // namespace torchium::optim::detail
