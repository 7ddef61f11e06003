#include "gradients/per_sample/sample_evaluation.h"

#include "gradients/capture/model_layers.h"
#include "gradients/capture/operator_capture.h"
#include "gradients/capture/registered_layer.h"
#include "gradients/per_sample/kept_state.h"
#include "gradients/per_sample/sample_checks.h"
#include "support/phase.h"
#include "support/vmap_level.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/autograd.h>

#include <optional>
#include <utility>

namespace torchium::gradients::detail {
namespace {

at::Tensor captured_output(OperatorCapture& capture, const SampleLoss& loss,
                           const at::Tensor& inputs) {
  capture.set_enabled(true);
  at::Tensor output = loss.forward(inputs);
  capture.set_enabled(false);
  capture.raise_error();
  return output;
}

// Sets the calls of one pass over all samples. Returns why dimension 0 of the captured tensors may
// not be the sample; empty: it is.
std::string capture_samples(OperatorCapture& capture, const SampleLoss& loss,
                            const std::vector<std::string>& names, KeptTensors& kept,
                            std::vector<LayerCall>& calls) {
  const torchium::detail::Phase phase("torchium::sample_capture");
  const int64_t samples = loss.samples();
  const at::Tensor& inputs = loss.inputs();
  at::Tensor output;
  {
    const ValueReads reads(loss.model());
    output = captured_output(capture, loss, inputs);
    if (reads.found() && samples > 1) {
      return "forward reads values of tensors, which may be those of other samples";
    }
  }
  if (output.dim() == 0 || output.size(0) != samples) {
    return c10::str("forward returned shape ", output.sizes(), " for ", samples, " samples");
  }
  const at::Tensor losses = loss.of_each(output);
  const int64_t other = capture.parameter_used_otherwise(losses);
  if (other >= 0) {
    return c10::str("the loss depends on '", names[other],
                    "' not only by the operators that are captured (linear, conv2d, embedding, "
                    "layer_norm, group_norm), with the parameter itself");
  }
  if (capture.has_overwritten_input()) {
    return "the input of a layer was changed in place";
  }
  calls = capture.differentiate(losses, {}, /*keep=*/samples > 1);
  for (const LayerCall& call : calls) {
    if (samples_of(call) != samples) {
      return c10::str("the layer of '", names[call.weight >= 0 ? call.weight : call.bias],
                      "' received ", call.input.sizes(), " for ", samples, " samples");
    }
  }
  if (samples == 1) {
    return "";
  }
  const at::Tensor factors = sample_factors(samples, losses.options());
  const auto scaled = capture.differentiate(losses, factors);
  if (!are_scaled(calls, scaled, factors)) {
    return "rows of a layer depend on the losses of other samples";
  }
  kept.restore();
  const at::Tensor first = captured_output(capture, loss, inputs.narrow(0, 0, 1));
  const at::Tensor first_loss = loss.of(first, loss.targets().narrow(0, 0, 1));
  if (!begin_with(calls, capture.differentiate(first_loss))) {
    return "layers receive another first sample when it is alone";
  }
  kept.restore();
  const at::Tensor rolled = captured_output(capture, loss, inputs.roll(1, 0));
  const auto rolled_calls = capture.differentiate();
  if (!are_rolled(calls, rolled_calls) || !rows_agree(rolled, output.roll(1, 0))) {
    return "layers receive another sample when it has another place in the batch";
  }
  return "";
}

void visit_samples(const SampleLoss& loss, const std::vector<at::Tensor>& params, int64_t first,
                   const SampleReceiver& of_sample) {
  const torchium::detail::Phase phase("torchium::sample_by_sample");
  KeptTensors kept(loss.model());
  for (const auto i : c10::irange(first, loss.samples())) {
    kept.restore();
    std::vector<at::Tensor> found;
    {
      const at::AutoGradMode enable_grad(true);
      const at::Tensor value =
          loss.of(loss.forward(loss.inputs().narrow(0, i, 1)), loss.targets().narrow(0, i, 1));
      if (!value.requires_grad()) {
        continue;
      }
      found = torch::autograd::grad({value}, params, /*grad_outputs=*/{},
                                    /*retain_graph=*/std::nullopt,
                                    /*create_graph=*/false, /*allow_unused=*/true);
    }
    for (auto& gradient : found) {
      if (gradient.defined() && gradient.is_sparse()) {
        gradient = gradient.to_dense();
      }
    }
    const at::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    of_sample(i, found);
  }
  kept.restore();
}

}  // namespace

SampleLoss::SampleLoss(const torch::nn::Module& model, const ForwardFunction& forward,
                       const LossFunction& loss_fn, const at::Tensor& inputs,
                       const at::Tensor& targets, int64_t least)
    : model_(model), forward_(forward), loss_fn_(loss_fn) {
  TORCH_CHECK_VALUE(forward && loss_fn, forward ? "loss_fn" : "forward", " is empty");
  TORCH_CHECK_VALUE(inputs.defined() && inputs.dim() > 0 && targets.defined() && targets.dim() > 0,
                    "inputs and targets must be tensors with a batch dimension");
  TORCH_CHECK_VALUE(inputs.size(0) == targets.size(0) && inputs.size(0) >= least, "inputs hold ",
                    inputs.size(0), " samples and targets ", targets.size(0),
                    "; there must be equally many", least > 0 ? ", at least one" : "");
  inputs_ = inputs.detach();
  targets_ = targets;
}

at::Tensor SampleLoss::forward(const at::Tensor& inputs) const {
  at::Tensor output = forward_(inputs);
  TORCH_CHECK_VALUE(output.defined(), "forward returned an undefined tensor");
  return output;
}

at::Tensor SampleLoss::of(const at::Tensor& output, const at::Tensor& target) const {
  const at::Tensor loss = loss_fn_(output, target);
  TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1, "loss_fn returned ",
                    loss.defined() ? c10::str("shape ", loss.sizes()) : "an undefined tensor",
                    " for one sample; it must return one number, e.g. a mean or a sum");
  return loss.reshape({});
}

at::Tensor SampleLoss::of_batch(const at::Tensor& output, const at::Tensor& targets) const {
  at::Tensor losses;
  try {
    losses = loss_fn_(output, targets);
  } catch (const std::exception&) {  // it takes single samples only
    return {};
  }
  const bool has_each = losses.defined() && losses.dim() == 1 && losses.size(0) == targets.size(0);
  return has_each ? losses : at::Tensor();
}

bool SampleLoss::depend_on_the_batch(const at::Tensor& losses, const at::Tensor& output) const {
  const at::NoGradGuard no_grad;
  const int64_t half = samples() / 2;
  std::vector<at::Tensor> of_halves;
  for (const auto& [first, count] : {std::pair(int64_t{0}, half), {half, samples() - half}}) {
    of_halves.push_back(of_batch(output.narrow(0, first, count), targets_.narrow(0, first, count)));
    if (!of_halves.back().defined()) {
      return true;
    }
  }
  return !rows_agree(losses.unsqueeze(1), at::cat(of_halves).unsqueeze(1));
}

at::Tensor SampleLoss::vmapped(const at::Tensor& output) const {
  const torchium::detail::VmapLevel level(samples());
  try {
    return level.all(of(level.batched(output.unsqueeze(1)), level.batched(targets_.unsqueeze(1))));
  } catch (const std::exception&) {  // single samples raise again what is not of vmap
    return {};
  }
}

at::Tensor SampleLoss::of_each(const at::Tensor& output) const {
  if (samples() > 1) {
    at::Tensor losses = of_batch(output, targets_);
    if (!losses.defined() || depend_on_the_batch(losses, output)) {
      losses = vmapped(output);
    }
    if (losses.defined()) {
      return losses;
    }
  }
  std::vector<at::Tensor> losses;
  for (const auto i : c10::irange(samples())) {
    losses.push_back(of(output.narrow(0, i, 1), targets_.narrow(0, i, 1)));
  }
  return at::stack(losses);
}

TrainableParameters::TrainableParameters(const torch::nn::Module& model) {
  const ModelLayers layers(model);
  for (const auto& [param, place] : layers.parameters()) {
    if (param.requires_grad()) {
      params.push_back(param);
      names.push_back(place->name);
    }
  }
}

void evaluate(const char* function, const SampleLoss& loss, const TrainableParameters& trainable,
              const std::function<void(const Jacobian&)>& of_jacobian,
              const std::function<void(const SampleVisit&)>& of_samples) {
  const auto& [params, names] = trainable;
  const ModelLayers layers(loss.model());
  layers.refuse_mixed_samples();
  if (loss.samples() == 0) {
    return;
  }
  std::string reason;  // for one pass per sample
  std::vector<at::Tensor> tensors{loss.inputs()};
  for (const auto& param : params) {
    const auto* place = layers.find(param);
    if (reason.empty() && !place->problem.empty()) {
      reason = place->module + " " + place->problem;
    }
    if (reason.empty() && place->samples != SampleDimension::kFirst) {
      reason = place->module + " takes samples in a dimension other than the first";
    }
    tensors.push_back(param);
  }
  KeptRandomState random_state(tensors);
  const auto refuse_random_numbers = [&] {
    TORCH_CHECK_VALUE(!random_state.has_drawn(),
                      "forward or loss_fn draws random numbers, so the gradient of a sample is not "
                      "defined; call eval() on the model or set the dropout probabilities to 0");
  };
  std::vector<LayerCall> calls;
  if (reason.empty()) {
    const at::AutoGradMode enable_grad(true);
    OperatorCapture capture(params);
    capture.take_registered_layers();
    KeptTensors kept(loss.model());
    reason = capture_samples(capture, loss, names, kept, calls);
    kept.restore();
    refuse_random_numbers();
    std::erase_if(calls, [](const LayerCall& call) { return !call.output_gradient.defined(); });
  }
  if (!reason.empty()) {
    TORCH_WARN_ONCE(function, " takes the samples one by one, which is slow for a batch: ", reason);
    of_samples([&](int64_t first, const SampleReceiver& of_sample) {
      visit_samples(loss, params, first, of_sample);
    });
    refuse_random_numbers();
  } else if (!calls.empty()) {
    const at::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    apply_formulas(params, calls);                         // which may use autograd
    const at::AutoDispatchBelowADInplaceOrView untracked;  // autograd's views take longer to make
    of_jacobian(Jacobian(params, calls));
  }
  random_state.restore();
}

void evaluate(const char* function, const SampleLoss& loss, const TrainableParameters& trainable,
              const std::function<void(const Jacobian&)>& of_jacobian,
              const SampleReceiver& of_sample) {
  const std::function<void(const SampleVisit&)> once = [&](const SampleVisit& visit) {
    visit(0, of_sample);
  };
  evaluate(function, loss, trainable, of_jacobian, once);
}

}  // namespace torchium::gradients::detail
