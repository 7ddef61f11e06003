// Per-sample gradients from ordinary backward passes.
#include "gradients/capture/kept_calls.h"
#include "gradients/capture/model_layers.h"
#include "gradients/capture/operator_capture.h"
#include "gradients/capture/registered_layer.h"
#include "gradients/jacobian/jacobian.h"
#include "gradients/per_sample/sample_checks.h"
#include "torchium/gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace torchium::gradients {

using detail::KeptCall;
using detail::LayerCall;
using detail::ModelLayers;

struct PerSample::State {
  State(const torch::nn::Module& model, bool is_mean);

  void compute();
  void check_parameters() const;
  // The calls of one backward pass, as one micro-batch.
  std::vector<LayerCall> checked_calls(const std::vector<KeptCall>& kept) const;
  std::vector<at::Tensor> rows_of(const std::vector<LayerCall>& calls) const;

  // Backward passes may run on other threads, and end after the scope does.
  struct Received {
    detail::KeptCalls calls;
    torch::OrderedDict<std::string, at::Tensor> rows;  // of these calls; empty: not computed
  };

  const torch::nn::Module& model;
  const bool is_mean;
  std::vector<at::Tensor> params;  // trainable when the scope began
  std::vector<std::string> names;
  const std::shared_ptr<Received> received = std::make_shared<Received>();
  std::unique_ptr<detail::OperatorCapture> capture;
};

PerSample::State::State(const torch::nn::Module& model, bool is_mean)
    : model(model), is_mean(is_mean) {
  const ModelLayers layers(model);
  layers.refuse_mixed_samples();
  std::vector<int64_t> inner_samples;
  for (const auto& [param, place] : layers.parameters()) {
    if (!param.requires_grad()) {
      continue;
    }
    TORCH_CHECK_VALUE(place->problem.empty(), place->module, " with the parameter '", place->name,
                      "' ", place->problem,
                      "; freeze its parameters (requires_grad_(false)), or call "
                      "per_sample_gradients(), which takes all layers");
    if (place->samples == detail::SampleDimension::kSecond) {
      inner_samples.push_back(static_cast<int64_t>(params.size()));
    }
    params.push_back(param);
    names.push_back(place->name);
  }
  TORCH_CHECK_VALUE(!params.empty(), "no parameter of the model requires a gradient");
  capture = std::make_unique<detail::OperatorCapture>(
      params,
      [received = received](LayerCall call, const std::vector<int64_t>& gone_passes) {
        received->rows.clear();
        keep_call(received->calls, KeptCall(std::move(call)), gone_passes);
      },
      /*takes_batch_norm=*/false, /*joins_passes=*/true);
  capture->set_inner_samples(inner_samples);
  capture->take_registered_layers();
  capture->set_enabled(true);
}

void PerSample::State::check_parameters() const {
  for (const auto& param : model.named_parameters()) {
    const bool is_known = std::any_of(params.begin(), params.end(), [&](const at::Tensor& known) {
      return known.is_same(param.value());
    });
    TORCH_CHECK_VALUE(is_known || !param.value().requires_grad(), "the parameter '", param.key(),
                      "' has become trainable after PerSample was constructed; construct it after "
                      "that");
  }
  for (const auto p : c10::irange(params.size())) {
    TORCH_CHECK_VALUE(!capture->is_used_otherwise(params[p]), "the loss depends on the parameter '",
                      names[p],
                      "' not only by the operators that are captured (linear, convolution, "
                      "embedding, norms), with the parameter itself; call per_sample_gradients()");
  }
}

std::vector<LayerCall> PerSample::State::checked_calls(const std::vector<KeptCall>& kept) const {
  std::vector<LayerCall> calls;
  for (const KeptCall& call : kept) {
    call.check_input("the rows have been read");
    calls.push_back(call.layer);
    calls.back().micro_batch = 0;  // also where passes are joined
  }
  detail::check_samples(calls, [&](int64_t p) { return "'" + names[p] + "'"; });
  detail::apply_formulas(params, calls);
  return calls;
}

std::vector<at::Tensor> PerSample::State::rows_of(const std::vector<LayerCall>& calls) const {
  const int64_t samples = detail::count_samples(calls).expect_int();
  const double scale = is_mean ? static_cast<double>(samples) : 1.0;
  auto rows = detail::Jacobian(params, calls, scale).rows();
  for (const auto p : c10::irange(rows.size())) {
    rows[p] = rows[p].to(params[p].scalar_type());
  }
  return rows;
}

void PerSample::State::compute() {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  TORCH_CHECK_VALUE(!received->calls.empty(),
                    "no backward pass of a batch that is not empty has reached a parameter by the "
                    "operators that are captured (linear, convolution, embedding, norms); run the "
                    "forward and the backward pass while PerSample exists");
  check_parameters();
  std::vector<std::vector<at::Tensor>> parts(params.size());  // by parameter and pass
  for (const auto& [pass, kept] : received->calls) {
    TORCH_CHECK_VALUE(!capture->mixes_samples(pass),
                      "batch_norm normalised with the statistics of the batch, so a sample has no "
                      "gradient of its own; call it with training=false and running statistics");
    const auto rows = rows_of(checked_calls(kept));
    for (const auto p : c10::irange(rows.size())) {
      parts[p].push_back(rows[p]);
    }
  }
  torch::OrderedDict<std::string, at::Tensor> rows;
  for (const auto p : c10::irange(params.size())) {
    const auto of_param = std::exchange(parts[p], {});
    rows.insert(names[p], of_param.size() == 1 ? of_param[0] : at::cat(of_param));
  }
  received->rows = std::move(rows);
}

PerSample::PerSample(const torch::nn::Module& model, const std::string& reduction) {
  TORCH_CHECK_VALUE(reduction == "mean" || reduction == "sum", "reduction is '", reduction,
                    "'; it must be 'mean' or 'sum'");
  state_ = std::make_unique<State>(model, reduction == "mean");
}

PerSample::~PerSample() = default;

const torch::OrderedDict<std::string, at::Tensor>& PerSample::grad_samples() {
  state_->capture->raise_error();
  auto& rows = state_->received->rows;
  if (rows.is_empty()) {
    state_->compute();
  }
  return rows;
}

at::Tensor PerSample::grad_sample(const std::string& name) {
  const auto* rows = grad_samples().find(name);
  TORCH_CHECK_VALUE(rows != nullptr, "the model has no trainable parameter '", name, "'");
  return *rows;
}

at::Tensor PerSample::grad_sample(const at::Tensor& param) {
  const auto& params = state_->params;
  const auto found = std::find_if(params.begin(), params.end(),
                                  [&](const at::Tensor& known) { return known.is_same(param); });
  TORCH_CHECK_VALUE(found != params.end(), "the tensor is not a trainable parameter of the model");
  return grad_sample(state_->names[found - params.begin()]);
}

}  // namespace torchium::gradients
