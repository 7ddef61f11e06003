// Operators on what layers have seen: schemas and registration, no maths. See gradients/*.h.

#include "gradients/capture/layer_call.h"
#include "gradients/factors/kronecker_factors.h"
#include "gradients/jacobian/jacobian.h"
#include "gradients/per_sample/sample_values.h"
#include "ops/registration.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

namespace torchium::ops {
namespace {

using gradients::detail::Jacobian;
using gradients::detail::LayerCall;
using gradients::detail::widest_state_dtype;
using Calls = std::vector<LayerCall>;

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

void kronecker_factors_add_lookups_meta(at::Tensor, at::Tensor, const at::Tensor&,
                                        const at::Tensor&, int64_t) {}

// A kernel that takes calls as parallel lists: function(params, calls, rest...).
template <auto* function>
struct OfCalls;
template <typename Result, typename... Rest,
          Result (*function)(at::TensorList, const Calls&, Rest...)>
struct OfCalls<function> {
  static Result kernel(at::TensorList params, at::TensorList inputs,
                       at::TensorList output_gradients, at::IntArrayRef calls,
                       at::ArrayRef<double> call_eps, Rest... rest) {
    const c10::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView untracked;  // autograd's views take longer to make
    return function(
        params, gradients::detail::parse_calls(inputs, output_gradients, calls, call_eps), rest...);
  }
};

std::vector<at::Tensor> per_sample_gradients(at::TensorList params, const Calls& calls,
                                             double scale, int64_t max_workspace_bytes) {
  gradients::detail::check_workspace(max_workspace_bytes);
  std::vector<at::Tensor> rows = Jacobian(params, calls, scale).rows(max_workspace_bytes);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = rows[i].to(params[i].scalar_type());
  }
  return rows;
}

at::Tensor per_sample_norms(at::TensorList params, const Calls& calls,
                            int64_t max_workspace_bytes) {
  gradients::detail::check_workspace(max_workspace_bytes);
  return Jacobian(params, calls).norms(max_workspace_bytes, widest_state_dtype(params));
}

at::Tensor per_sample_gram(at::TensorList params, const Calls& calls) {
  return gradients::detail::gram_of(Jacobian(params, calls), params.size());
}

at::Tensor per_sample_products(at::TensorList params, const Calls& calls, at::TensorList vectors) {
  const auto v = gradients::detail::as_state(params, vectors);
  return Jacobian(params, calls).product(v).to(widest_state_dtype(params));
}

std::tuple<std::vector<at::Tensor>, at::Tensor> clipped_gradient_sums(at::TensorList params,
                                                                      const Calls& calls,
                                                                      double max_norm,
                                                                      int64_t max_workspace_bytes) {
  gradients::detail::check_max_norm(max_norm);
  gradients::detail::check_workspace(max_workspace_bytes);
  const Jacobian jacobian(params, calls);
  const at::Tensor norms = jacobian.norms(max_workspace_bytes);
  auto sums = jacobian.transpose_product(gradients::detail::clip_factors(norms, max_norm));
  return {std::move(sums), norms.to(widest_state_dtype(params))};
}

// Shapes and dtypes alone.

c10::SymInt checked_samples(at::TensorList params, const Calls& calls) {
  gradients::detail::check_calls(calls, static_cast<int64_t>(params.size()));
  return gradients::detail::count_samples(calls);
}

std::vector<at::Tensor> per_sample_gradients_meta(at::TensorList params, const Calls& calls,
                                                  double /*scale*/,
                                                  int64_t /*max_workspace_bytes*/) {
  const c10::SymInt samples = checked_samples(params, calls);
  std::vector<at::Tensor> rows;
  for (const auto& param : params) {
    auto sizes = param.sym_sizes().vec();
    sizes.insert(sizes.begin(), samples);
    rows.push_back(at::empty_symint(sizes, param.options().requires_grad(false)));
  }
  return rows;
}

at::Tensor meta_of_samples(at::TensorList params, const Calls& calls, int64_t dims,
                           at::ScalarType dtype) {
  const std::vector<c10::SymInt> sizes(dims, checked_samples(params, calls));
  return at::empty_symint(sizes,
                          calls[0].output_gradient.options().dtype(dtype).requires_grad(false));
}

at::Tensor per_sample_norms_meta(at::TensorList params, const Calls& calls,
                                 int64_t /*max_workspace_bytes*/) {
  return meta_of_samples(params, calls, 1, widest_state_dtype(params));
}

at::Tensor per_sample_gram_meta(at::TensorList params, const Calls& calls) {
  return meta_of_samples(params, calls, 2, at::kDouble);
}

at::Tensor per_sample_products_meta(at::TensorList params, const Calls& calls,
                                    at::TensorList /*vectors*/) {
  return meta_of_samples(params, calls, 1, widest_state_dtype(params));
}

std::tuple<std::vector<at::Tensor>, at::Tensor> clipped_gradient_sums_meta(
    at::TensorList params, const Calls& calls, double /*max_norm*/, int64_t max_workspace_bytes) {
  std::vector<at::Tensor> sums;
  for (const auto& param : params) {
    const auto dtype = widest_state_dtype({param});
    sums.push_back(
        at::empty_symint(param.sym_sizes(), param.options().dtype(dtype).requires_grad(false)));
  }
  return {std::move(sums), per_sample_norms_meta(params, calls, max_workspace_bytes)};
}

template <auto* function, auto* meta>
void define_of_calls(torch::Library& m, const char* schema) {
  define(m, schema, &OfCalls<function>::kernel, &OfCalls<meta>::kernel);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  // `call` is one row of `calls` below, of which kind and settings count.
  define(m,
         "kronecker_factors_update_(Tensor(a!) A_sum, Tensor(b!) G_sum, Tensor input, "
         "Tensor output_gradient, *, int[] call, int[] weight_shape, bool accumulate=True) -> ()",
         kronecker_factors_update_, kronecker_factors_update_meta);
  define(m,
         "kronecker_factors_add_lookups_(Tensor(a!) A_sum, Tensor(b!) G_sum, Tensor lookup_A_sum, "
         "Tensor counts, *, int rows) -> ()",
         kronecker_factors_add_lookups_, kronecker_factors_add_lookups_meta);
  // `calls`: a row [kind, weight, bias, micro_batch, s0..s11] per call
  // (gradients/capture/layer_call.h).
  define_of_calls<per_sample_gradients, per_sample_gradients_meta>(
      m,
      "per_sample_gradients(Tensor[] params, Tensor[] inputs, Tensor[] output_gradients, "
      "int[] calls, float[] call_eps, *, float scale=1.0, int max_workspace_bytes=268435456) -> "
      "Tensor[]");
  define_of_calls<per_sample_norms, per_sample_norms_meta>(
      m,
      "per_sample_norms(Tensor[] params, Tensor[] inputs, Tensor[] output_gradients, int[] calls, "
      "float[] call_eps, *, int max_workspace_bytes) -> Tensor");
  define_of_calls<per_sample_gram, per_sample_gram_meta>(
      m,
      "per_sample_gram(Tensor[] params, Tensor[] inputs, Tensor[] output_gradients, int[] calls, "
      "float[] call_eps) -> Tensor");
  define_of_calls<per_sample_products, per_sample_products_meta>(
      m,
      "per_sample_products(Tensor[] params, Tensor[] inputs, Tensor[] output_gradients, "
      "int[] calls, float[] call_eps, *, Tensor[] vectors) -> Tensor");
  define_of_calls<clipped_gradient_sums, clipped_gradient_sums_meta>(
      m,
      "clipped_gradient_sums(Tensor[] params, Tensor[] inputs, Tensor[] output_gradients, "
      "int[] calls, float[] call_eps, *, float max_norm, int max_workspace_bytes) "
      "-> (Tensor[] sums, Tensor norms)");
}

}  // namespace torchium::ops
