// Which rule a step of Shampoo follows for a parameter, and what a report says about it.
#pragma once

#include "optim/shampoo/shampoo_step.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torchium::optim::detail {

enum class ParameterRule : uint8_t {
  kMatrices,  // preconditioned by the roots of its blocks
  kDiagonal,  // m (a / c + eps)^(-1/2), with a diagonal of statistics
  kGrafted,   // the direction of the grafted method, with no state but that method's
};

// The rule of a parameter with the dimensions that merged_dims() gives. One that is not to be
// preconditioned takes the grafted method's direction where that has a second moment, else the
// diagonal rule.
ParameterRule parameter_rule(const ShampooHyperparameters& hyperparameters, at::IntArrayRef dims);

// The same for the shape of a parameter as it is.
ParameterRule rule_of_shape(const ShampooHyperparameters& hyperparameters, at::IntArrayRef shape);

struct RuleText {
  std::string rule;    // "preconditioned", "diagonal" or the name of the grafted method
  std::string detail;  // blocks and exponent, or why no matrices precondition the parameter
};
RuleText describe_rule(const ShampooHyperparameters& hyperparameters, at::IntArrayRef shape);

}  // namespace torchium::optim::detail
