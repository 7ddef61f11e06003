#include "optim/natural_gradient/natural_gradient_planned_step.h"

#include "optim/natural_gradient/parameter_segments.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <cstdint>

namespace torchium::optim::detail {
namespace {

using gradients::detail::LayerCall;

void for_each_tensor(LayerCall& call, const std::function<void(at::Tensor&)>& visit) {
  for (at::Tensor* tensor : {&call.input, &call.output_gradient, &call.mean, &call.variance}) {
    if (tensor->defined()) {
      visit(*tensor);
    }
  }
}

void add_call(GraphKey& key, const LayerCall& call) {
  add_bytes(key, call.kind);
  for (const int64_t number : {call.weight, call.bias, call.micro_batch}) {
    add_bytes(key, number);
  }
  add_bytes(key, call.settings);
  add_bytes(key, call.eps);
  key.push_back(call.mean.defined());
}

}  // namespace

void NaturalGradientPlannedStep::run(const at::Tensor&, at::IntArrayRef,
                                     const at::Tensor& found_inf) {
  if (batch.is_empty()) {
    at::_foreach_add_(state.steps, 1);
    return;
  }
  L = known_L;
  numbers = natural_gradient_step(options, solver, params, grads_, state, batch, L, found_inf);
}

// ---- graphs

std::optional<GraphKey> NaturalGradientPlannedStep::graph_key(at::IntArrayRef) const {
  const bool draws_sketch =  // with random numbers and eigenvalues
      solver.name == "cg" && options.nystrom_rank > 0 && !known_L.defined();
  const bool has_collectives = batch.shared != nullptr;
  if (batch.is_empty() || draws_sketch || is_probing ||
      (has_collectives && !(captures_collectives && batch.shared->ranks().is_capturable()))) {
    return std::nullopt;
  }
  GraphKey key{is_kept, known_L.defined(), batch.is_of_gradient, batch.loss_scale.defined(),
               batch.residuals.defined()};
  add_global_settings(key);
  add_bytes(key, solver.name == "cg" ? solver.rule.max_iterations : 0);
  add_bytes(key, batch.scale);
  if (batch.shared != nullptr) {
    for (const int64_t count : batch.shared->counts()) {
      add_bytes(key, count);
    }
    add_bytes(key, batch.lists == nullptr ? 0 : batch.lists->hash);
  }
  for (const size_t first : first_with_lr()) {
    add_bytes(key, first);
  }
  for (LayerCall call : batch.calls) {
    add_call(key, call);
    if (is_kept) {
      for_each_tensor(call, [&](const at::Tensor& tensor) {
        add_bytes(key, tensor.const_data_ptr());
        add_layout(key, tensor);
      });
    }
  }
  return key;
}

// For each parameter the first one with the same learning rate.
std::vector<size_t> NaturalGradientPlannedStep::first_with_lr() const {
  std::vector<size_t> first;
  for (const auto p : c10::irange(options.lrs.size())) {
    size_t q = 0;
    while (!same_number(options.lrs[q], options.lrs[p])) {
      ++q;
    }
    first.push_back(q);
  }
  return first;
}

// The learning rates are the first ones, equal ones once.
void NaturalGradientPlannedStep::for_each_input(const std::function<void(at::Tensor&)>& visit) {
  const auto first = first_with_lr();
  for (const auto p : c10::irange(first.size())) {
    if (first[p] == p) {
      visit(options.lrs[p]);
    } else {
      options.lrs[p] = options.lrs[first[p]];
    }
  }
  for (at::Tensor& grad : grads_) {
    visit(grad);
  }
  for (LayerCall& call : batch.calls) {
    if (!is_kept) {
      for_each_tensor(call, visit);
    }
  }
  for (at::Tensor& rows : batch.given_rows) {
    visit(rows);
  }
  for (at::Tensor* tensor : {&batch.residuals, &batch.loss_scale, &known_L}) {
    if (tensor->defined()) {
      visit(*tensor);
    }
  }
}

std::vector<at::Tensor> NaturalGradientPlannedStep::inputs() {
  std::vector<at::Tensor> inputs;
  for_each_input([&](const at::Tensor& tensor) { inputs.push_back(tensor); });
  return inputs;
}

void NaturalGradientPlannedStep::set_inputs(at::TensorList inputs) {
  size_t next = 0;
  for_each_input([&](at::Tensor& tensor) { tensor = inputs[next++]; });
}

// A factorisation that later steps need is copied, because their graphs share scratch memory with
// this one.
std::vector<at::Tensor> NaturalGradientPlannedStep::results() const {
  return is_reused ? std::vector<at::Tensor>{numbers, L} : std::vector<at::Tensor>{numbers};
}

void NaturalGradientPlannedStep::set_results(at::TensorList results) {
  numbers = results[0];
  if (known_L.defined()) {
    L = known_L;
  } else if (is_reused && results[1].defined()) {
    L = results[1].clone();
  }
}

}  // namespace torchium::optim::detail
