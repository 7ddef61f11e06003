#include "gradients/capture/model_layers.h"

#include <c10/util/Exception.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include <string_view>

namespace torchium::gradients::detail {
namespace {

namespace nn = torch::nn;

template <typename... Types>
bool is_one_of(const nn::Module& module) {
  return ((dynamic_cast<const Types*>(&module) != nullptr) || ...);
}

// "LSTM" of torch::nn::LSTMImpl
std::string type_name(const nn::Module& module) {
  std::string name = module.name();
  const size_t scope = name.rfind("::");
  name = scope == std::string::npos ? name : name.substr(scope + 2);
  constexpr std::string_view suffix = "Impl";
  if (name.size() > suffix.size() && std::string_view(name).ends_with(suffix)) {
    name.resize(name.size() - suffix.size());
  }
  return name;
}

// Within the module; outside: that around it.
SampleDimension samples_within(const nn::Module& module, SampleDimension outside) {
  if (is_one_of<nn::RNNImpl, nn::LSTMImpl, nn::GRUImpl>(module)) {
    return SampleDimension::kHidden;
  }
  const bool is_attention = is_one_of<nn::MultiheadAttentionImpl, nn::TransformerEncoderLayerImpl,
                                      nn::TransformerDecoderLayerImpl, nn::TransformerEncoderImpl,
                                      nn::TransformerDecoderImpl, nn::TransformerImpl>(module);
  return is_attention && outside == SampleDimension::kFirst ? SampleDimension::kSecond : outside;
}

bool is_batch_norm(const nn::Module& module) {
  return is_one_of<nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl>(module);
}

template <typename BatchNorm>
bool mixes_samples(const nn::Module& module) {
  const auto* norm = dynamic_cast<const BatchNorm*>(&module);
  return norm != nullptr && (norm->is_training() || !norm->running_mean.defined());
}

constexpr const char* kUnsupported = "is of an unsupported type";

std::string problem_of(const nn::Module& module) {
  if (const auto* embedding = dynamic_cast<const nn::EmbeddingImpl*>(&module)) {
    const auto& options = embedding->options;
    return options.max_norm().has_value() ? "has max_norm"
           : options.scale_grad_by_freq() ? "has scale_grad_by_freq = true"
           : options.sparse()             ? "has sparse = true"
                                          : "";
  }
  if (const auto* attention = dynamic_cast<const nn::MultiheadAttentionImpl*>(&module)) {
    return attention->_qkv_same_embed_dim ? "" : "has kdim or vdim";
  }
  if (is_batch_norm(module)) {
    return "is of an unsupported type, and in training normalises with the statistics of the batch";
  }
  const bool is_known =
      is_one_of<nn::LinearImpl, nn::Conv1dImpl, nn::Conv2dImpl, nn::Conv3dImpl,
                nn::ConvTranspose1dImpl, nn::ConvTranspose2dImpl, nn::ConvTranspose3dImpl,
                nn::LayerNormImpl, nn::GroupNormImpl>(module);
  const bool is_stock = std::string_view(module.name()).starts_with("torch::nn::");
  return is_known || !is_stock ? "" : kUnsupported;
}

}  // namespace

ModelLayers::ModelLayers(const nn::Module& model) {
  add_module("", model, model.weak_from_this(), SampleDimension::kFirst);
}

void ModelLayers::add_module(const std::string& name, const nn::Module& module,
                             std::weak_ptr<const nn::Module> weak, SampleDimension samples) {
  samples = samples_within(module, samples);
  const std::string prefix = name.empty() ? "" : name + ".";
  const std::string description = name.empty() ? "the model (" + type_name(module) + ")"
                                               : "layer '" + name + "' (" + type_name(module) + ")";
  if (is_batch_norm(module)) {
    batch_norms_.emplace_back(description, std::move(weak));
  }
  for (const auto& param : module.named_parameters(/*recurse=*/false)) {
    ParameterPlace place{.name = prefix + param.key(),
                         .module = description,
                         .type = type_name(module),
                         .problem = problem_of(module),
                         .samples = samples};
    place.is_unsupported = place.problem == kUnsupported;
    if (samples == SampleDimension::kHidden && place.problem.empty()) {
      place.problem = "takes samples in a dimension other than the first";
    }
    at::TensorImpl* impl = param.value().unsafeGetTensorImpl();
    if (places_.emplace(impl, std::move(place)).second) {
      order_.emplace_back(param.value().getIntrusivePtr());
    }
  }
  for (const auto& child : module.named_children()) {
    add_module(prefix + child.key(), *child.value(), child.value(), samples);
  }
}

const ParameterPlace* ModelLayers::find(const at::Tensor& param) const {
  const auto found = places_.find(param.unsafeGetTensorImpl());
  return found == places_.end() ? nullptr : &found->second;
}

std::vector<std::pair<at::Tensor, const ParameterPlace*>> ModelLayers::parameters() const {
  std::vector<std::pair<at::Tensor, const ParameterPlace*>> result;
  for (const auto& weak : order_) {
    if (auto impl = weak.lock()) {
      at::Tensor param(std::move(impl));
      const ParameterPlace* place = find(param);
      result.emplace_back(std::move(param), place);
    }
  }
  return result;
}

void ModelLayers::refuse_mixed_samples() const {
  for (const auto& [description, weak] : batch_norms_) {
    const auto module = weak.lock();
    TORCH_CHECK_VALUE(module == nullptr || !(mixes_samples<nn::BatchNorm1dImpl>(*module) ||
                                             mixes_samples<nn::BatchNorm2dImpl>(*module) ||
                                             mixes_samples<nn::BatchNorm3dImpl>(*module)),
                      description,
                      " normalises with the statistics of the batch, so that the samples have no "
                      "gradients of their own; call eval() on it (with running statistics) or use "
                      "GroupNorm");
  }
}

}  // namespace torchium::gradients::detail
