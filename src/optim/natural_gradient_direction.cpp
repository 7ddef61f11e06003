#include "optim/natural_gradient_direction.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace torchium::optim::detail {
namespace {

using gradients::detail::Jacobian;

// A bound of |r|^2 where r is nothing but the rounding of v.
at::Tensor largest_square_of_rounding(const ParameterVector& v,
                                      const std::vector<double>& roundings) {
  const at::Tensor squares = dots(v, v);
  return at::dot(squares, at::tensor(roundings, squares.options()).square_());
}

// The c of v = c u, on the CPU; none where that is not so.
std::optional<double> multiple_on_cpu(const ParameterVector& v, const ParameterVector& u,
                                      const std::vector<double>& roundings) {
  const double uu = dot(u, u).item<double>();
  const double c = uu == 0.0 ? 0.0 : dot(v, u).item<double>() / uu;
  const double bound = largest_square_of_rounding(v, roundings).item<double>();
  return squared_distance_on_cpu(v, u, c) <= bound ? std::optional(c) : std::nullopt;
}

// v = c u + r. On a device r is always formed, because the host must not ask whether it is zero.
GradientSplit split(const ParameterVector& v, const ParameterVector& u,
                    const std::vector<double>& roundings) {
  const at::Tensor uu = dot(u, u);
  const at::Tensor c = at::where(uu == 0, 0.0, dot(v, u) / uu);
  ParameterVector r;
  for (const auto& tensor : v) {
    r.push_back(tensor.clone());
  }
  add_scaled_(r, u, c.neg());
  const at::Tensor negligible = dot(r, r) <= largest_square_of_rounding(v, roundings);
  if (!negligible.is_cpu()) {
    for (auto& tensor : r) {
      tensor.masked_fill_(negligible, 0);
    }
    return {c, r};
  }
  return negligible.item<bool>() ? GradientSplit{c, {}} : GradientSplit{c, r};
}

// 1 / n for each sample
at::Tensor weights_of_mean(const Jacobian& J, const ParameterVector& v) {
  return at::full({J.samples()}, 1.0 / static_cast<double>(J.samples()),
                  v[0].options().dtype(at::kDouble));
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

Jacobian::Sketch sketch_gradient(const Jacobian& J, const ParameterVector& v) {
  return J.sketch(v, weights_of_mean(J, v));
}

GradientSplit split_gradient(const Jacobian& J, const ParameterVector& v,
                             const std::vector<double>& roundings,
                             const std::optional<Jacobian::Sketch>& images) {
  if (images) {
    const auto c = multiple_on_cpu(images->of_x, images->of_transpose_product, roundings);
    if (c) {
      return {at::scalar_tensor(*c, at::TensorOptions(at::kDouble)), {}};
    }
  }
  return split(v, J.transpose_product(weights_of_mean(J, v)), roundings);
}

// With v = c J^T 1 / n + r, x = mu d_prev + Lambda^-1 r and S = J Lambda^-1 J^T / n + I it is
//   d = x + Lambda^-1 J^T w,  w = S^-1 (c 1 - J x) / n.
// With r for all of v (c = 0) the two terms would cancel, and lose their digits.
SampleSpaceSolution solve_in_sample_space(const Jacobian& J, const std::vector<double>& dampings,
                                          const GradientSplit& v, const ScaledVector& previous,
                                          const at::Tensor& L) {
  ScaledVector x = previous;
  if (!v.r.empty()) {
    x = {divided_by_dampings(dampings, v.r), std::vector<double>(v.r.size(), 1.0)};
    add_(x.x, previous);
  }
  at::Tensor y = v.c.expand({J.samples()});
  if (!x.x.empty()) {
    y = y - J.product(x.x, x.scales);
  }
  const double n = static_cast<double>(J.samples());
  return {x, at::cholesky_solve(y.unsqueeze(1), L).squeeze(1).div_(n)};
}

ParameterVector direction(const Jacobian& J, const std::vector<double>& dampings,
                          const SampleSpaceSolution& solution) {
  std::vector<double> inverse_dampings;
  for (const double damping : dampings) {
    inverse_dampings.push_back(1.0 / damping);
  }
  ParameterVector d = J.transpose_product(solution.w, inverse_dampings);
  add_(d, solution.x);
  return d;
}

// The row J_ip of sample i and parameter p has |J_ip|^2 / (damping_p n) <= S_ii = |L_i|^2.
at::Tensor largest_entry(const at::Tensor& w, const at::Tensor& L,
                         const std::vector<double>& dampings) {
  const double n = static_cast<double>(w.size(0));
  const double least = *std::min_element(dampings.begin(), dampings.end());
  return at::dot(w.abs(), at::linalg_vector_norm(L, 2, 1)).mul_(std::sqrt(n / least));
}

ConjugateGradientsResult cg_direction(const Jacobian& J, const std::vector<double>& dampings,
                                      double eps, ParameterVector v, const ScaledVector& previous) {
  const double n = static_cast<double>(J.samples());
  const auto damped_fisher = [&](const ParameterVector& x) {
    ParameterVector result = J.transpose_product(J.product(x).div_(n));
    add_(result, {x, dampings});
    return result;
  };
  const auto precondition = [&](const ParameterVector& x) {
    return divided_by_dampings(dampings, x);
  };
  if (!previous.x.empty()) {
    const ParameterVector known =
        J.transpose_product(J.product(previous.x, previous.scales).div_(n));
    for (size_t p = 0; p < v.size(); ++p) {
      v[p] = v[p] - known[p];
    }
  }
  int64_t size = 0;
  double floor = 0.0;
  for (const auto& tensor : v) {
    size += tensor.numel();
    floor = std::max(floor, tensor.scalar_type() == at::kDouble
                                ? std::numeric_limits<double>::epsilon()
                                : std::numeric_limits<float>::epsilon());
  }
  // As many iterations as F has non-zero eigenvalues, and one, would do without rounding.
  const int64_t rank = std::min(size, J.samples());
  const ConjugateGradientsRule rule{std::max(eps, 4 * floor),
                                    std::min<int64_t>(4 * rank + 20, 1000)};
  ConjugateGradientsResult result = conjugate_gradients(damped_fisher, precondition, v, rule);
  add_(result.x, previous);
  return result;
}

}  // namespace torchium::optim::detail
