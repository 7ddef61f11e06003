#include "optim/core/model_groups.h"

#include <torch/nn/modules/embedding.h>

#include <memory>
#include <unordered_set>
#include <utility>

namespace torchium::optim::detail {
namespace {

using Tensors = std::vector<at::Tensor>;
using ParameterSet = std::unordered_set<const at::TensorImpl*>;

void add_embeddings(const torch::nn::Module& module, ParameterSet& found) {
  if (dynamic_cast<const torch::nn::EmbeddingImpl*>(&module) != nullptr ||
      dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&module) != nullptr) {
    for (const auto& param : module.parameters()) {
      found.insert(param.unsafeGetTensorImpl());
    }
  }
  for (const auto& child : module.children()) {
    add_embeddings(*child, found);
  }
}

}  // namespace

std::vector<torch::optim::OptimizerParamGroup> model_groups(const torch::nn::Module& model,
                                                            const ShampooOptions& options) {
  ParameterSet embeddings, seen;
  add_embeddings(model, embeddings);
  Tensors of_embeddings, others;
  for (const auto& param : model.parameters()) {
    const at::TensorImpl* impl = param.unsafeGetTensorImpl();
    if (seen.insert(impl).second) {
      (embeddings.count(impl) != 0 ? of_embeddings : others).push_back(param);
    }
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  const auto add = [&](Tensors params, ShampooOptions of_group) {
    if (!params.empty()) {
      groups.emplace_back(std::move(params), std::make_unique<ShampooOptions>(std::move(of_group)));
    }
  };
  add(std::move(others), options);
  add(std::move(of_embeddings), ShampooOptions(options).preconditioned(false));
  return groups;
}

}  // namespace torchium::optim::detail
