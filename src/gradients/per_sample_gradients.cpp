#include "gradients/jacobian.h"
#include "gradients/model_layers.h"
#include "gradients/operator_capture.h"
#include "torchium/gradients.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>

#include <mutex>
#include <utility>
#include <vector>

namespace torchium {
namespace {

using gradients::detail::LayerUse;
using gradients::detail::ModelLayers;
using gradients::detail::OperatorCapture;

// Gives buffers their values back when it is destroyed, as a module may count its calls in one.
class KeptBuffers {
 public:
  explicit KeptBuffers(const torch::nn::Module& model) {
    for (const auto& buffer : model.buffers()) {
      kept_.push_back({buffer, buffer.detach().clone(), buffer._version()});
    }
  }
  ~KeptBuffers() {
    const at::NoGradGuard no_grad;
    for (auto& [buffer, value, version] : kept_) {
      if (buffer._version() != version) {
        buffer.copy_(value);
      }
    }
  }
  KeptBuffers(const KeptBuffers&) = delete;
  KeptBuffers& operator=(const KeptBuffers&) = delete;

 private:
  struct Entry {
    at::Tensor buffer;
    at::Tensor value;
    int64_t version;
  };
  std::vector<Entry> kept_;
};

// Gives the generators of random numbers their state back when it is destroyed.
class KeptRandomState {
 public:
  explicit KeptRandomState(c10::Device device) {
    generators_.push_back(at::globalContext().defaultGenerator(at::kCPU));
    if (!device.is_cpu()) {
      generators_.push_back(at::globalContext().defaultGenerator(device));
    }
    states_ = read();
  }
  ~KeptRandomState() {
    for (const auto i : c10::irange(generators_.size())) {
      const std::lock_guard lock(generators_[i].mutex());
      generators_[i].set_state(states_[i]);
    }
  }
  KeptRandomState(const KeptRandomState&) = delete;
  KeptRandomState& operator=(const KeptRandomState&) = delete;

  bool has_changed() {
    const auto now = read();
    for (const auto i : c10::irange(now.size())) {
      if (!at::equal(now[i], states_[i])) {
        return true;
      }
    }
    return false;
  }

 private:
  std::vector<at::Tensor> read() {
    std::vector<at::Tensor> states;
    for (auto& generator : generators_) {
      const std::lock_guard lock(generator.mutex());
      states.push_back(generator.get_state());
    }
    return states;
  }

  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> states_;
};

void check_batch(const at::Tensor& inputs, const at::Tensor& targets) {
  TORCH_CHECK_VALUE(inputs.defined() && inputs.dim() > 0 && targets.defined() && targets.dim() > 0,
                    "inputs and targets must be tensors with a batch dimension");
  TORCH_CHECK_VALUE(inputs.size(0) == targets.size(0) && inputs.size(0) > 0, "inputs hold ",
                    inputs.size(0), " samples and targets ", targets.size(0),
                    "; there must be equally many, at least one");
}

at::Tensor sum_of_losses(const LossFunction& loss_fn, const at::Tensor& output,
                         const at::Tensor& targets) {
  std::vector<at::Tensor> losses;
  for (const auto i : c10::irange(targets.size(0))) {
    const at::Tensor loss = loss_fn(output.narrow(0, i, 1), targets.narrow(0, i, 1));
    TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1, "loss_fn returned shape ",
                      loss.defined() ? loss.sizes() : at::IntArrayRef(),
                      " for one sample; it must return one number, e.g. a mean or a sum");
    losses.push_back(loss.reshape({}));
  }
  return at::stack(losses).sum();
}

// Raises ValueError where a parameter gets a gradient that no use explains, or dimension 0 of what
// a layer has received may not be the sample.
void check_uses(const std::vector<LayerUse>& uses, const std::vector<LayerUse>& uses_of_one,
                int64_t samples, const std::vector<std::string>& names) {
  for (const auto i : c10::irange(uses.size())) {
    const LayerUse& use = uses[i];
    const bool sees_one =
        i < uses_of_one.size() && gradients::detail::samples_of(uses_of_one[i]) == 1;
    TORCH_CHECK_VALUE(
        gradients::detail::samples_of(use) == samples && sees_one, "the layer of '",
        names[use.weight >= 0 ? use.weight : use.bias], "' received ", use.input.sizes(), " for ",
        samples, " samples; dimension 0 must be the sample (expand positions to [batch, ...])");
  }
}

}  // namespace

torch::OrderedDict<std::string, at::Tensor> per_sample_gradients(const torch::nn::Module& model,
                                                                 const ForwardFunction& forward,
                                                                 const LossFunction& loss_fn,
                                                                 const at::Tensor& inputs,
                                                                 const at::Tensor& targets) {
  check_batch(inputs, targets);
  const ModelLayers layers(model);
  layers.refuse_mixed_samples();
  std::vector<at::Tensor> params;
  std::vector<std::string> names;
  for (const auto& [param, place] : layers.parameters()) {
    if (!param.requires_grad()) {
      continue;
    }
    TORCH_CHECK_VALUE(place->problem.empty(), "per_sample_gradients cannot see the samples of ",
                      place->module, ", which ", place->problem, "; freeze its parameter '",
                      place->name, "'");
    params.push_back(param);
    names.push_back(place->name);
  }

  const at::AutoGradMode enable_grad(true);
  const KeptBuffers buffers(model);
  KeptRandomState random_state(inputs.device());
  OperatorCapture capture(params);
  const auto uses_of = [&](const at::Tensor& batch, const at::Tensor& batch_targets) {
    capture.set_enabled(true);
    const at::Tensor output = forward(batch);
    capture.set_enabled(false);
    capture.raise_error();
    TORCH_CHECK_VALUE(output.dim() > 0 && output.size(0) == batch.size(0),
                      "forward returned shape ", output.sizes(), " for ", batch.size(0),
                      " samples; dimension 0 must be the sample");
    const at::Tensor loss = sum_of_losses(loss_fn, output, batch_targets);
    const int64_t other = capture.parameter_used_otherwise(loss);
    TORCH_CHECK_VALUE(other < 0, "the loss depends on '", names[other],
                      "' not only by the operators that per_sample_gradients captures (linear, "
                      "conv2d, embedding, layer_norm, group_norm), with the parameter itself");
    return capture.differentiate(loss);
  };
  const auto uses = uses_of(inputs.detach(), targets);
  if (inputs.size(0) > 1) {
    check_uses(uses, uses_of(inputs.detach().narrow(0, 0, 1), targets.narrow(0, 0, 1)),
               inputs.size(0), names);
  }
  TORCH_CHECK_VALUE(!random_state.has_changed(),
                    "forward or loss_fn draws random numbers, so the gradient of a sample is not "
                    "defined; call eval() on the model or set the dropout probabilities to 0");

  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  torch::OrderedDict<std::string, at::Tensor> result;
  std::vector<at::Tensor> rows;
  if (!uses.empty()) {
    rows = gradients::detail::Jacobian(params, uses).rows();
  }
  for (const auto i : c10::irange(params.size())) {
    auto shape = params[i].sizes().vec();
    shape.insert(shape.begin(), inputs.size(0));
    const auto options = params[i].options().requires_grad(false);
    result.insert(names[i],
                  uses.empty() ? at::zeros(shape, options) : rows[i].to(params[i].scalar_type()));
  }
  return result;
}

}  // namespace torchium
