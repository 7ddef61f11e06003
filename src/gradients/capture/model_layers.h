// Names of a model's parameters, and layers whose samples cannot be separated.
#pragma once

#include "torchium/export.h"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torchium::gradients::detail {

// Which dimension of what a layer receives is the sample.
enum class SampleDimension { kFirst, kSecond, kHidden };

// A parameter's place in a model; of a shared one, its first place.
struct ParameterPlace {
  std::string name;    // in the model, as "0.weight"
  std::string module;  // "layer '0' (Linear)"
  std::string type;    // "Linear"
  // Why it has no per-sample gradients, such as "is of an unsupported type"; empty: it may have. A
  // module outside of torch::nn is supported if it calls the operators of layers.
  std::string problem;
  bool is_unsupported = false;  // by its type, which mixes no samples
  // The second one within attention and transformer layers, hidden within recurrent ones.
  SampleDimension samples = SampleDimension::kFirst;
};

// Looks at a model once, and keeps neither its parameters nor its modules alive.
class TORCHIUM_API ModelLayers {
 public:
  explicit ModelLayers(const torch::nn::Module& model);

  // Null: not a parameter of the model.
  const ParameterPlace* find(const at::Tensor& param) const;
  // All parameters with their places, in the model's order; those that still exist.
  std::vector<std::pair<at::Tensor, const ParameterPlace*>> parameters() const;
  // Throws c10::ValueError, naming it, for a module that normalises with statistics of the batch.
  void refuse_mixed_samples() const;

 private:
  void add_module(const std::string& name, const torch::nn::Module& module,
                  std::weak_ptr<const torch::nn::Module> weak, SampleDimension samples);

  std::vector<c10::weak_intrusive_ptr<at::TensorImpl>> order_;
  std::unordered_map<const at::TensorImpl*, ParameterPlace> places_;
  // With descriptions as ParameterPlace::module.
  std::vector<std::pair<std::string, std::weak_ptr<const torch::nn::Module>>> batch_norms_;
};

}  // namespace torchium::gradients::detail
