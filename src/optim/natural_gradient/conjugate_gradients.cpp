#include "optim/natural_gradient/conjugate_gradients.h"

#include <ATen/ATen.h>

#include <cmath>

namespace torchium::optim::detail {
namespace {

// a / b, zero where b is: after convergence the iterates stay where they are. NaN stays NaN.
at::Tensor safe_ratio(const at::Tensor& a, const at::Tensor& b) {
  return at::where(b <= 0, 0.0, a / b);
}

}  // namespace

ConjugateGradientsResult conjugate_gradients(
    const std::function<ParameterVector(const ParameterVector&)>& apply,
    const std::function<ParameterVector(const ParameterVector&)>& precondition,
    const ParameterVector& b, const ConjugateGradientsRule& rule) {
  ConjugateGradientsResult result;
  ParameterVector r;
  for (const auto& tensor : b) {
    result.x.push_back(at::zeros_like(tensor));
    r.push_back(tensor.clone());
  }
  const at::Tensor b_norm = dot(b, b).sqrt_();
  const int64_t interval = b[0].is_cpu() ? 1 : kResidualInterval;
  ParameterVector z = precondition(r);
  ParameterVector p;
  for (const auto& tensor : z) {
    p.push_back(tensor.clone());
  }
  at::Tensor rz = dot(r, z);
  result.relative_residual = safe_ratio(b_norm, b_norm);
  while (result.iterations < rule.max_iterations) {
    if (result.iterations % interval == 0) {
      const double residual = result.relative_residual.item<double>();
      // NaN in b reaches x in the first iteration.
      if (residual <= rule.tolerance || (std::isnan(residual) && result.iterations > 0)) {
        break;
      }
    }
    const ParameterVector Ap = apply(p);
    const at::Tensor alpha = safe_ratio(rz, dot(p, Ap));
    add_scaled_(result.x, p, alpha);
    add_scaled_(r, Ap, alpha.neg());
    z = precondition(r);
    const at::Tensor rz_new = dot(r, z);
    const at::Tensor beta = safe_ratio(rz_new, rz);
    for (size_t i = 0; i < p.size(); ++i) {
      p[i].mul_(beta).add_(z[i]);
    }
    rz = rz_new;
    ++result.iterations;
    result.relative_residual = safe_ratio(dot(r, r).sqrt_(), b_norm);
  }
  return result;
}

}  // namespace torchium::optim::detail
