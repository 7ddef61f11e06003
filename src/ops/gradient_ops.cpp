// Operators on what layers have seen: schemas and registration, no maths. See gradients/*.h.

#include "gradients/capture/graph_edges.h"
#include "gradients/capture/layer_call.h"
#include "gradients/capture/mixed_samples.h"
#include "gradients/factors/kronecker_factors.h"
#include "gradients/jacobian/jacobian.h"
#include "ops/in_place_fake.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

namespace torchium::ops {
namespace {

using gradients::detail::Jacobian;
using gradients::detail::LayerCall;

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
                                             at::ArrayRef<double> call_eps, double scale) {
  c10::NoGradGuard no_grad;
  const auto parsed = gradients::detail::parse_calls(inputs, output_gradients, calls, call_eps);
  std::vector<at::Tensor> rows = Jacobian(params, parsed, scale).rows();
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = rows[i].to(params[i].scalar_type());
  }
  return rows;
}

std::vector<at::Tensor> per_sample_gradients_meta(at::TensorList params, at::TensorList inputs,
                                                  at::TensorList output_gradients,
                                                  at::IntArrayRef calls,
                                                  at::ArrayRef<double> call_eps, double scale) {
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

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  // `use` is one row of `uses` below, of which kind and settings count.
  m.def(
      "kronecker_factors_update_(Tensor(a!) A_sum, Tensor(b!) G_sum, Tensor input, "
      "Tensor output_gradient, *, int[] call, int[] weight_shape, bool accumulate=True) -> ()");
  m.def(
      "kronecker_factors_add_lookups_(Tensor(a!) A_sum, Tensor(b!) G_sum, Tensor lookup_A_sum, "
      "Tensor counts, *, int rows) -> ()");
  // `uses`: a row [kind, weight, bias, micro_batch, s0..s7] a call, see
  // gradients/capture/layer_call.h.
  m.def(
      "per_sample_gradients(Tensor[] params, Tensor[] inputs, Tensor[] output_gradients, "
      "int[] calls, float[] call_eps, *, float scale=1.0) -> Tensor[]");
  m.def("backward_pass_mixes_samples() -> bool");
  m.def("backward_pass_edges(Tensor[] params) -> int[]");
}

TORCH_LIBRARY_IMPL(torchium, CompositeExplicitAutograd, m) {
  m.impl("backward_pass_edges", gradients::detail::backward_pass_edges);
  m.impl("backward_pass_mixes_samples", gradients::detail::backward_pass_mixes_samples);
  m.impl("kronecker_factors_update_", kronecker_factors_update_);
  m.impl("kronecker_factors_add_lookups_", kronecker_factors_add_lookups_);
  m.impl("per_sample_gradients", per_sample_gradients);
}

TORCH_LIBRARY_IMPL(torchium, Meta, m) {
  m.impl("kronecker_factors_update_", kronecker_factors_update_meta);
  m.impl("kronecker_factors_add_lookups_", InPlaceFake<&kronecker_factors_add_lookups_>::call);
  m.impl("per_sample_gradients", per_sample_gradients_meta);
}

}  // namespace torchium::ops
