#include "optim/natural_gradient/conjugate_gradients.h"

#include <ATen/ATen.h>

#include <cmath>

namespace torchium::optim::detail {
namespace {

// a / b, zero where b is. NaN stays NaN.
at::Tensor safe_ratio(const at::Tensor& a, const at::Tensor& b) {
  return at::where(b <= 0, 0.0, a / b);
}

bool is_nan(const at::Tensor& number) { return std::isnan(number.item<double>()); }

}  // namespace

ConjugateGradientsResult conjugate_gradients(
    const std::function<ParameterVector(const ParameterVector&)>& apply,
    const std::function<ParameterVector(const ParameterVector&)>& precondition,
    const ParameterVector& b, const ConjugateGradientsRule& rule,
    const std::function<bool(bool)>& on_any_rank) {
  ConjugateGradientsResult result;
  ParameterVector r;
  for (const auto& tensor : b) {
    result.x.push_back(at::zeros_like(tensor));
    r.push_back(tensor.clone());
  }
  const at::Tensor b_norm = dot(b, b).sqrt_();
  ParameterVector z = precondition(r);
  ParameterVector p;
  for (const auto& tensor : z) {
    p.push_back(tensor.clone());
  }
  at::Tensor rz = dot(r, z);
  result.iterations = at::zeros({}, rz.options());
  result.relative_residual = safe_ratio(b_norm, b_norm);
  for (int64_t k = 0; k < rule.max_iterations; ++k) {
    const at::Tensor done = result.relative_residual <= rule.tolerance;  // NaN goes on, into x
    if (done.is_cpu() &&
        on_any_rank(done.item<bool>() || (k > 0 && is_nan(result.relative_residual)))) {
      break;
    }
    const ParameterVector Ap = apply(p);
    const at::Tensor alpha = safe_ratio(rz, dot(p, Ap)).masked_fill_(done, 0.0);
    add_scaled_(result.x, p, alpha);
    add_scaled_(r, Ap, alpha.neg());
    z = precondition(r);
    const at::Tensor rz_new = dot(r, z);
    const at::Tensor beta = safe_ratio(rz_new, rz).masked_fill_(done, 0.0);
    for (size_t i = 0; i < p.size(); ++i) {
      p[i].mul_(beta).add_(z[i]);
    }
    rz = rz_new;
    result.iterations.add_(done.logical_not());
    result.relative_residual = safe_ratio(dot(r, r).sqrt_(), b_norm);
  }
  return result;
}

}  // namespace torchium::optim::detail
