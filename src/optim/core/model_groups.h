// Parameter groups of a model, by kind of layer.
#pragma once

#include "torchium/optim/shampoo.h"

#include <torch/nn/module.h>

#include <vector>

namespace torchium::optim::detail {

// Two groups with `options`: the parameters of embeddings, with preconditioned = false, and all
// others. Each parameter is in one group. Empty groups are left out.
std::vector<torch::optim::OptimizerParamGroup> model_groups(const torch::nn::Module& model,
                                                            const ShampooOptions& options);

}  // namespace torchium::optim::detail
