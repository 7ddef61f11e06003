#include "optim/kfac/kfac_step.h"

#include "optim/blocked/block_storage.h"
#include "optim/blocked/elementwise.h"
#include "optim/blocked/root_failures.h"
#include "optim/core/argument_checks.h"
#include "optim/core/found_inf_guard.h"
#include "optim/kfac/cuda/fused_kfac.h"
#include "optim/kfac/kfac_direction.h"
#include "optim/kfac/kfac_inverses.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

namespace torchium::optim::detail {
namespace {

using Tensors = std::vector<at::Tensor>;

// The largest accepted entry of a factor, with a margin for rounding.
double largest_factor(at::ScalarType dtype) { return largest_number(dtype) / 4.0; }

// What captured sums are multiplied by: a mean over the batch has divided the output gradients by
// N, and N^2 / N makes them those of single samples.
double scale_of_A(const KfacLayer& layer) { return 1.0 / static_cast<double>(layer.rows); }
double scale_of_G(const KfacHyperparameters& h, const KfacLayer& layer) {
  const auto N = static_cast<double>(layer.samples);
  return h.batch_averaged ? N : 1.0 / N;
}

// The captured sums, as parts of their weights. The largest entry of a sum of x x^T is on its
// diagonal (Cauchy and Schwarz).
std::vector<Examined> captured_sums(const KfacHyperparameters& h,
                                    const std::vector<KfacLayer>& layers) {
  std::vector<Examined> examined;
  for (const KfacLayer& layer : layers) {
    if (layer.samples == 0) {
      continue;
    }
    const auto weight = static_cast<size_t>(layer.weight);
    const double largest = largest_factor(layer.A.scalar_type());
    const auto add = [&](const at::Tensor& sum, double scale) {
      const at::Tensor diagonal = sum.dim() == 2 ? sum : sum.diagonal(0, -2, -1);
      examined.push_back({diagonal.contiguous(), weight, largest / std::max(scale, 1.0), {}});
    };
    add(layer.A_sum, scale_of_A(layer));
    add(layer.G_sum, scale_of_G(h, layer));
  }
  return examined;
}

// Examines the gradients and the captured sums, and counts the step.
FoundInfGuard check_and_count(const KfacHyperparameters& h, at::TensorList params,
                              at::TensorList grads, const std::vector<Examined>& sums,
                              KfacState& state) {
  std::vector<double> weight_decays;
  for (const auto& options : h.parameters) {
    weight_decays.push_back(options.weight_decay);
  }
  auto examined = examined_gradients(params, grads, state.steps, weight_decays);
  examined.insert(examined.end(), sums.begin(), sums.end());
  const FoundInfGuard guard = FoundInfGuard::check(examined, state.status, h.found_inf);
  if (!guard.skipped_on_host()) {
    guard.advance(state.steps);
  }
  return guard;
}

// A <- d_k A + (1 - d_k) A_sum / (N T) and G <- d_k G + (1 - d_k) G_sum N^(+-1) with
// d_k = min(1 - 1/k, stat_decay) for the k-th update.
void update_factors(const KfacHyperparameters& h, KfacLayer& layer, const FoundInfGuard& guard) {
  const double A_scale = scale_of_A(layer);
  const double G_scale = scale_of_G(h, layer);
  if (layer.A.is_cpu()) {
    layer.factor_updates.add_(1);
    const double d = std::min(1.0 - 1.0 / layer.factor_updates.item<double>(), layer.stat_decay);
    scale_and_add_(layer.A, d, layer.A_sum, (1.0 - d) * A_scale);
    scale_and_add_(layer.G, d, layer.G_sum, (1.0 - d) * G_scale);
    return;
  }
  guard.advance(layer.factor_updates);
  const at::Tensor k = layer.factor_updates.to(at::kDouble).clamp_min_(1.0);
  const at::Tensor d = (1.0 - k.reciprocal()).clamp_max_(layer.stat_decay);
  const at::Tensor weight = guard.zero_if_skipped(1.0 - d).to(layer.A.scalar_type());
  layer.A.lerp_(guard.zero_if_skipped(layer.A_sum) * A_scale, weight);
  layer.G.lerp_(guard.zero_if_skipped(layer.G_sum) * G_scale, weight);
}

void record_failures(const std::vector<KfacLayer>& layers, at::Tensor& status) {
  if (std::none_of(layers.begin(), layers.end(),
                   [](const auto& l) { return l.inverse_due || l.inverse_lost; })) {
    return;
  }
  std::vector<RootFailures> failures;
  for (const KfacLayer& layer : layers) {
    failures.push_back({layer.root_failures, layer.weight});
  }
  record_root_failures(failures, status);
}

// lr of each parameter; a tensor that many share is read once.
std::vector<StepScalar> learning_rates(const std::vector<KfacParameterOptions>& options,
                                       const FoundInfGuard& guard) {
  std::vector<StepScalar> lrs;
  for (size_t i = 0; i < options.size(); ++i) {
    const bool shared = i > 0 && options[i].lr.is_same(options[i - 1].lr);
    lrs.push_back(shared ? lrs.back() : guard.learning_rate(options[i].lr));
  }
  return lrs;
}

// min(1, sqrt(kl_clip / |sum v.g lr^2|)) over the parameters of the layers.
StepScalar kl_scale(const std::optional<double>& kl_clip, const std::vector<KfacLayer>& layers,
                    const Tensors& directions, const Tensors& g,
                    const std::vector<StepScalar>& lrs) {
  if (!kl_clip.has_value() || layers.empty()) {
    return {};
  }
  StepScalar sum{0.0, {}};
  for (const KfacLayer& layer : layers) {
    for (const int64_t i : {layer.weight, layer.bias}) {
      if (i < 0) {
        continue;
      }
      const at::Tensor product = at::dot(directions[i].reshape(-1), g[i].reshape(-1));
      if (!lrs[i].device.defined() && product.is_cpu()) {
        sum.host += product.item<double>() * lrs[i].host * lrs[i].host;
        continue;
      }
      at::Tensor lr = lrs[i].device.defined() ? lrs[i].device.to(at::kDouble)
                                              : at::full({}, lrs[i].host, at::kDouble);
      const at::Tensor term = product.to(at::kDouble) * lr.square();
      sum.device = sum.device.defined() ? sum.device + term : term;
    }
  }
  if (!sum.device.defined()) {
    return {std::min(1.0, std::sqrt(*kl_clip / std::abs(sum.host))), {}};
  }
  return {0.0, (sum.device + sum.host).abs().reciprocal().mul(*kl_clip).sqrt().clamp_max(1.0)};
}

// V -> the preconditioned direction, for the weight and the bias of a layer.
void precondition(const KfacLayer& layer, DampingSplit split, Tensors& directions) {
  const at::Tensor bias = layer.bias < 0 ? at::Tensor() : directions[layer.bias];
  const LayerTensors d = kfac_direction(layer, split, {directions[layer.weight], bias});
  directions[layer.weight] = d.weight;
  if (layer.bias >= 0) {
    directions[layer.bias] = d.bias;
  }
}

std::vector<bool> parameters_of(const std::vector<KfacLayer>& layers, size_t count) {
  std::vector<bool> of_a_layer(count, false);
  for (const KfacLayer& layer : layers) {
    of_a_layer[layer.weight] = true;
    if (layer.bias >= 0) {
      of_a_layer[layer.bias] = true;
    }
  }
  return of_a_layer;
}

}  // namespace

void kfac_step(const KfacHyperparameters& h, at::TensorList params, at::TensorList grads,
               std::vector<KfacLayer>& layers, KfacState& state) {
  c10::NoGradGuard no_grad;
  if (params.empty()) {
    return;
  }
  update_inverses(layers, &KfacLayer::inverse_lost, h.damping_split, h.root_method,
                  FoundInfGuard::open());
  const std::vector<Examined> sums = captured_sums(h, layers);
  const auto fused = FusedKfac::make(h, params, grads, layers, state);
  const FoundInfGuard guard =
      fused != nullptr ? fused->begin(sums) : check_and_count(h, params, grads, sums, state);
  if (guard.skipped_on_host()) {
    return;
  }
  for (KfacLayer& layer : layers) {
    if (layer.samples > 0) {  // A <- d A + (1 - d) E[a a^T], G <- d G + (1 - d) E[g g^T]
      update_factors(h, layer, guard);
    }
  }
  // Where due: (A + ..I)^-1, (G + ..I)^-1.
  update_inverses(layers, &KfacLayer::inverse_due, h.damping_split, h.root_method, guard);
  record_failures(layers, state.status);
  if (fused != nullptr) {
    fused->update();
    return;
  }

  Tensors g;  // V = g + weight_decay p
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& options = h.parameters[i];
    g.push_back(
        signed_gradient(params[i], grads[i], options.maximize, options.weight_decay, guard));
  }
  Tensors d = g;
  for (const KfacLayer& layer : layers) {  // d = (G + ..I)^-1 V (A + ..I)^-1
    precondition(layer, h.damping_split, d);
  }
  const auto lrs = learning_rates(h.parameters, guard);
  const StepScalar clip = kl_scale(h.kl_clip, layers, d, g, lrs);  // nu
  const std::vector<bool> preconditioned = parameters_of(layers, params.size());
  for (size_t i = 0; i < params.size(); ++i) {  // buf <- momentum buf + nu d; p <- p - lr buf
    const UpdateRule rule{.momentum = h.parameters[i].momentum,
                          .direction_scale = preconditioned[i] ? clip : StepScalar()};
    at::Tensor param = params[i];
    at::Tensor* buffer = rule.momentum > 0.0 ? &state.momentum_buffers[i] : nullptr;
    apply_update(rule, lrs[i], param, d[i], buffer, guard);
  }
}

}  // namespace torchium::optim::detail
