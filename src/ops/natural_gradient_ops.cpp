// Operators of the natural gradient: schemas and registration, no maths. See
// optim/natural_gradient/natural_gradient_step.h.

#include "gradients/jacobian/jacobian.h"
#include "optim/natural_gradient/natural_gradient_step.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <tuple>

namespace torchium::ops {
namespace {

using optim::detail::CapturedBatch;
using optim::detail::NaturalGradientHyperparameters;
using optim::detail::NaturalGradientState;

CapturedBatch captured_batch(at::TensorList inputs, at::TensorList output_gradients,
                             at::IntArrayRef calls, at::ArrayRef<double> call_eps, double scale,
                             const std::optional<at::Tensor>& loss_scale) {
  return {gradients::detail::parse_calls(inputs, output_gradients, calls, call_eps), scale,
          loss_scale.value_or(at::Tensor())};
}

std::tuple<at::Tensor, at::Tensor> natural_gradient_step_(
    at::TensorList params, at::TensorList grads, at::TensorList steps,
    at::TensorList momentum_buffers, at::Tensor status, at::TensorList inputs,
    at::TensorList output_gradients, at::IntArrayRef calls, at::ArrayRef<double> call_eps,
    const std::optional<at::Tensor>& factorization, at::TensorList lrs,
    at::ArrayRef<double> dampings, at::ArrayRef<double> momentums, const c10::List<bool>& maximize,
    double eps, std::optional<double> max_norm, std::string solver, bool refreshed,
    const std::optional<at::Tensor>& found_inf, double scale,
    const std::optional<at::Tensor>& loss_scale) {
  const NaturalGradientHyperparameters h{.lrs = lrs.vec(),
                                         .dampings = dampings.vec(),
                                         .momentums = momentums.vec(),
                                         .maximize = maximize.vec(),
                                         .eps = eps,
                                         .max_norm = max_norm,
                                         .solver = std::move(solver)};
  NaturalGradientState state{.steps = steps.vec(),
                             .momentum_buffers = momentum_buffers.vec(),
                             .status = std::move(status)};
  at::Tensor L = factorization.value_or(at::Tensor());
  const bool is_known = L.defined();
  const at::Tensor report = optim::detail::natural_gradient_step(
      h, params, grads, state,
      captured_batch(inputs, output_gradients, calls, call_eps, scale, loss_scale), L, refreshed,
      found_inf.value_or(at::Tensor()));
  return {report, is_known || !L.defined() ? at::empty({0, 0}, report.options()) : L};
}

std::tuple<at::Tensor, at::Tensor> natural_gradient_step_meta(
    at::TensorList params, at::TensorList grads, at::TensorList steps,
    at::TensorList momentum_buffers, at::Tensor status, at::TensorList inputs,
    at::TensorList output_gradients, at::IntArrayRef calls, at::ArrayRef<double> call_eps,
    const std::optional<at::Tensor>& factorization, at::TensorList lrs,
    at::ArrayRef<double> dampings, at::ArrayRef<double> momentums, const c10::List<bool>& maximize,
    double eps, std::optional<double> max_norm, std::string solver, bool refreshed,
    const std::optional<at::Tensor>& found_inf, double scale,
    const std::optional<at::Tensor>& loss_scale) {
  const auto parsed = gradients::detail::parse_calls(inputs, output_gradients, calls, call_eps);
  c10::SymInt size = 0;
  for (const auto& param : params) {
    size += param.sym_numel();
  }
  c10::SymInt order = gradients::detail::count_samples(parsed);
  if (factorization || !optim::detail::solves_in_sample_space(solver, order, size)) {
    order = 0;
  }
  const auto options = status.options().dtype(at::kDouble);
  return {at::empty({3}, options), at::empty_symint({order, order}, options)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  // `uses`: a row [kind, weight, bias, micro_batch, s0..s7] a call, see
  // gradients/capture/layer_call.h. Output gradients times scale / loss_scale are those of
  // per-sample losses. They should come in the dtype that they were captured in, which tells how
  // well the gradients are known. Returns the report (natural_gradient_step.h) and the
  // factorization, if it was none and the solver needs one; else it is [0, 0].
  m.def(
      "natural_gradient_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] steps, "
      "Tensor(c!)[] momentum_buffers, Tensor(d!) status, Tensor[] inputs, "
      "Tensor[] output_gradients, int[] calls, float[] call_eps, Tensor? factorization, *, "
      "Tensor[] lrs, float[] dampings, float[] momentums, bool[] maximize, float eps, "
      "float? max_norm, str solver, bool refreshed, Tensor? found_inf=None, float scale=1.0, "
      "Tensor? loss_scale=None) -> (Tensor report, Tensor factorization)");
}

TORCH_LIBRARY_IMPL(torchium, CompositeExplicitAutograd, m) {
  m.impl("natural_gradient_step_", natural_gradient_step_);
}

TORCH_LIBRARY_IMPL(torchium, Meta, m) {
  m.impl("natural_gradient_step_", natural_gradient_step_meta);
}

}  // namespace torchium::ops
