// Operators on what layers have seen: schemas and registration, no maths. See gradients/*.h.

#include "gradients/capture/layer_call.h"
#include "gradients/factors/kronecker_factors.h"
#include "gradients/jacobian/jacobian.h"
#include "gradients/per_sample/sample_values.h"
#include "ops/in_place_fake.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

namespace torchium::ops {
namespace {

using gradients::detail::Jacobian;
using gradients::detail::LayerCall;
using gradients::detail::widest_state_dtype;

LayerCall one_call(const at::Tensor& input, const at::Tensor& output_gradient,
                   at::IntArrayRef call) {
  return gradients::detail::parse_calls({input}, {output_gradient}, call, {0.0})[0];
}

void kronecker_factors_update_(at::Tensor A_sum, at::Tensor G_sum, const at::Tensor& input,
                               const at::Tensor& output_gradient, at::IntArrayRef call,
                               at::IntArrayRef weight_shape, bool accumulate) {
  gradients::detail::update_kronecker_factors_(A_sum, G_sum, one_call(input, output_gradient, call),
                                               weight_shape, accumulate);
}

void kronecker_factors_update_meta(at::Tensor A_sum, at::Tensor G_sum, const at::Tensor& input,
                                   const at::Tensor& output_gradient, at::IntArrayRef call,
                                   at::IntArrayRef weight_shape, bool /*accumulate*/) {
  gradients::detail::check_kronecker_factors(A_sum, G_sum, one_call(input, output_gradient, call),
                                             weight_shape);
}

void kronecker_factors_add_lookups_(at::Tensor A_sum, at::Tensor G_sum,
                                    const at::Tensor& lookup_A_sum, const at::Tensor& counts,
                                    int64_t rows) {
  gradients::detail::add_lookup_factors_(A_sum, G_sum, rows, lookup_A_sum, counts);
}

std::vector<at::Tensor> per_sample_gradients(at::TensorList params, at::TensorList inputs,
                                             at::TensorList output_gradients, at::IntArrayRef calls,
                                             at::ArrayRef<double> call_eps, double scale,
                                             int64_t max_workspace_bytes) {
  c10::NoGradGuard no_grad;
  gradients::detail::check_workspace(max_workspace_bytes);
  const auto parsed = gradients::detail::parse_calls(inputs, output_gradients, calls, call_eps);
  std::vector<at::Tensor> rows = Jacobian(params, parsed, scale).rows(max_workspace_bytes);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = rows[i].to(params[i].scalar_type());
  }
  return rows;
}

std::vector<at::Tensor> per_sample_gradients_meta(at::TensorList params, at::TensorList inputs,
                                                  at::TensorList output_gradients,
                                                  at::IntArrayRef calls,
                                                  at::ArrayRef<double> call_eps, double scale,
                                                  int64_t /*max_workspace_bytes*/) {
  const auto parsed = gradients::detail::parse_calls(inputs, output_gradients, calls, call_eps);
  gradients::detail::check_calls(parsed, static_cast<int64_t>(params.size()));
  const c10::SymInt samples = gradients::detail::count_samples(parsed);
  std::vector<at::Tensor> rows;
  for (const auto& param : params) {
    auto sizes = param.sym_sizes().vec();
    sizes.insert(sizes.begin(), samples);
    rows.push_back(at::empty_symint(sizes, param.options().requires_grad(false)));
  }
  return rows;
}

at::Tensor per_sample_norms(at::TensorList params, at::TensorList inputs,
                            at::TensorList output_gradients, at::IntArrayRef calls,
                            at::ArrayRef<double> call_eps, int64_t max_workspace_bytes) {
  c10::NoGradGuard no_grad;
  gradients::detail::check_workspace(max_workspace_bytes);
  const auto parsed = gradients::detail::parse_calls(inputs, output_gradients, calls, call_eps);
  return Jacobian(params, parsed).norms(max_workspace_bytes, widest_state_dtype(params));
}

at::Tensor per_sample_gram(at::TensorList params, at::TensorList inputs,
                           at::TensorList output_gradients, at::IntArrayRef calls,
                           at::ArrayRef<double> call_eps) {
  c10::NoGradGuard no_grad;
  const auto parsed = gradients::detail::parse_calls(inputs, output_gradients, calls, call_eps);
  return gradients::detail::gram_of(Jacobian(params, parsed), params.size());
}

at::Tensor per_sample_products(at::TensorList params, at::TensorList inputs,
                               at::TensorList output_gradients, at::IntArrayRef calls,
                               at::ArrayRef<double> call_eps, at::TensorList vectors) {
  c10::NoGradGuard no_grad;
  const auto parsed = gradients::detail::parse_calls(inputs, output_gradients, calls, call_eps);
  const auto v = gradients::detail::as_state(params, vectors);
  return Jacobian(params, parsed).product(v).to(widest_state_dtype(params));
}

std::tuple<std::vector<at::Tensor>, at::Tensor> clipped_gradient_sums(
    at::TensorList params, at::TensorList inputs, at::TensorList output_gradients,
    at::IntArrayRef calls, at::ArrayRef<double> call_eps, double max_norm,
    int64_t max_workspace_bytes) {
  c10::NoGradGuard no_grad;
  gradients::detail::check_max_norm(max_norm);
  gradients::detail::check_workspace(max_workspace_bytes);
  const auto parsed = gradients::detail::parse_calls(inputs, output_gradients, calls, call_eps);
  const Jacobian jacobian(params, parsed);
  const at::Tensor norms = jacobian.norms(max_workspace_bytes);
  auto sums = jacobian.transpose_product(gradients::detail::clip_factors(norms, max_norm));
  return {std::move(sums), norms.to(widest_state_dtype(params))};
}

at::Tensor meta_of_samples(at::TensorList params, at::TensorList inputs,
                           at::TensorList output_gradients, at::IntArrayRef calls,
                           at::ArrayRef<double> call_eps, int64_t dims, at::ScalarType dtype) {
  const auto parsed = gradients::detail::parse_calls(inputs, output_gradients, calls, call_eps);
  gradients::detail::check_calls(parsed, static_cast<int64_t>(params.size()));
  const std::vector<c10::SymInt> sizes(dims, gradients::detail::count_samples(parsed));
  return at::empty_symint(sizes, output_gradients[0].options().dtype(dtype).requires_grad(false));
}

at::Tensor per_sample_norms_meta(at::TensorList params, at::TensorList inputs,
                                 at::TensorList output_gradients, at::IntArrayRef calls,
                                 at::ArrayRef<double> call_eps, int64_t /*max_workspace_bytes*/) {
  return meta_of_samples(params, inputs, output_gradients, calls, call_eps, 1,
                         widest_state_dtype(params));
}

at::Tensor per_sample_gram_meta(at::TensorList params, at::TensorList inputs,
                                at::TensorList output_gradients, at::IntArrayRef calls,
                                at::ArrayRef<double> call_eps) {
  return meta_of_samples(params, inputs, output_gradients, calls, call_eps, 2, at::kDouble);
}

at::Tensor per_sample_products_meta(at::TensorList params, at::TensorList inputs,
                                    at::TensorList output_gradients, at::IntArrayRef calls,
                                    at::ArrayRef<double> call_eps, at::TensorList /*vectors*/) {
  return meta_of_samples(params, inputs, output_gradients, calls, call_eps, 1,
                         widest_state_dtype(params));
}

std::tuple<std::vector<at::Tensor>, at::Tensor> clipped_gradient_sums_meta(
    at::TensorList params, at::TensorList inputs, at::TensorList output_gradients,
    at::IntArrayRef calls, at::ArrayRef<double> call_eps, double /*max_norm*/,
    int64_t max_workspace_bytes) {
  std::vector<at::Tensor> sums;
  for (const auto& param : params) {
    const auto dtype = widest_state_dtype({param});
    sums.push_back(
        at::empty_symint(param.sym_sizes(), param.options().dtype(dtype).requires_grad(false)));
  }
  return {std::move(sums), per_sample_norms_meta(params, inputs, output_gradients, calls, call_eps,
                                                 max_workspace_bytes)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  // `call` is one row of `calls` below, of which kind and settings count.
  m.def(
      "kronecker_factors_update_(Tensor(a!) A_sum, Tensor(b!) G_sum, Tensor input, "
      "Tensor output_gradient, *, int[] call, int[] weight_shape, bool accumulate=True) -> ()");
  m.def(
      "kronecker_factors_add_lookups_(Tensor(a!) A_sum, Tensor(b!) G_sum, Tensor lookup_A_sum, "
      "Tensor counts, *, int rows) -> ()");
  // `calls`: a row [kind, weight, bias, micro_batch, s0..s11] per call
  // (gradients/capture/layer_call.h).
  m.def(
      "per_sample_gradients(Tensor[] params, Tensor[] inputs, Tensor[] output_gradients, "
      "int[] calls, float[] call_eps, *, float scale=1.0, int max_workspace_bytes=268435456) -> "
      "Tensor[]");
  m.def(
      "per_sample_norms(Tensor[] params, Tensor[] inputs, Tensor[] output_gradients, int[] calls, "
      "float[] call_eps, *, int max_workspace_bytes) -> Tensor");
  m.def(
      "per_sample_gram(Tensor[] params, Tensor[] inputs, Tensor[] output_gradients, int[] calls, "
      "float[] call_eps) -> Tensor");
  m.def(
      "per_sample_products(Tensor[] params, Tensor[] inputs, Tensor[] output_gradients, "
      "int[] calls, float[] call_eps, *, Tensor[] vectors) -> Tensor");
  m.def(
      "clipped_gradient_sums(Tensor[] params, Tensor[] inputs, Tensor[] output_gradients, "
      "int[] calls, float[] call_eps, *, float max_norm, int max_workspace_bytes) "
      "-> (Tensor[] sums, Tensor norms)");
}

TORCH_LIBRARY_IMPL(torchium, CompositeExplicitAutograd, m) {
  m.impl("kronecker_factors_update_", kronecker_factors_update_);
  m.impl("kronecker_factors_add_lookups_", kronecker_factors_add_lookups_);
  m.impl("per_sample_gradients", per_sample_gradients);
  m.impl("per_sample_norms", per_sample_norms);
  m.impl("per_sample_gram", per_sample_gram);
  m.impl("per_sample_products", per_sample_products);
  m.impl("clipped_gradient_sums", clipped_gradient_sums);
}

TORCH_LIBRARY_IMPL(torchium, Meta, m) {
  m.impl("kronecker_factors_update_", kronecker_factors_update_meta);
  m.impl("kronecker_factors_add_lookups_", InPlaceFake<&kronecker_factors_add_lookups_>::call);
  m.impl("per_sample_gradients", per_sample_gradients_meta);
  m.impl("per_sample_norms", per_sample_norms_meta);
  m.impl("per_sample_gram", per_sample_gram_meta);
  m.impl("per_sample_products", per_sample_products_meta);
  m.impl("clipped_gradient_sums", clipped_gradient_sums_meta);
}

}  // namespace torchium::ops
