// Parameter groups of a model, by what is best for each kind of layer.
#pragma once

#include "torchium/optim/shampoo.h"

#include <torch/nn/module.h>

#include <vector>

namespace torchium::optim::detail {

// One group with `options` of all parameters, each once, but for those of embeddings: they are a
// second group, with preconditioned = false. A group without parameters is left out.
std::vector<torch::optim::OptimizerParamGroup> model_groups(const torch::nn::Module& model,
                                                            const ShampooOptions& options);

}  // namespace torchium::optim::detail
