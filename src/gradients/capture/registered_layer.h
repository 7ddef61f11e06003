// Layers of users, whose classes have a formula (torchium/register_layer.h).
#pragma once

#include "gradients/capture/layer_call.h"
#include "torchium/register_layer.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <typeindex>
#include <vector>

namespace torchium::gradients::detail {

using Formula = LayerFormula<torch::nn::Module>;

// Null: layers of this class have none.
std::shared_ptr<const Formula> formula_of(std::type_index type);

// A layer whose rows its formula gives. Keeps the layer alive if a pointer owns it.
struct RegisteredLayer {
  std::shared_ptr<const Formula> formula;
  std::shared_ptr<const torch::nn::Module> owner;  // null: it is on the stack
  const torch::nn::Module* layer = nullptr;
  std::string weight, bias;  // the names of the parameters of a call; empty: none
};

// Replaces the calls of such layers by the rows of their parameters, for Jacobian. c10::ValueError
// for rows that do not fit `params`.
void apply_formulas(const std::vector<at::Tensor>& params, std::vector<LayerCall>& calls);

}  // namespace torchium::gradients::detail
