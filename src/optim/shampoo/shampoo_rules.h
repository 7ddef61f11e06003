// Values derived from the options of Shampoo, and the rule that a step follows for a parameter.
#pragma once

#include "optim/blocked/blocked_plan.h"
#include "optim/blocked/blocking.h"
#include "optim/blocked/preconditioner.h"
#include "torchium/optim/shampoo.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::optim::detail {

inline double beta1(const ShampooOptions& o) { return std::get<0>(o.betas()); }
inline double beta2(const ShampooOptions& o) { return std::get<1>(o.betas()); }
// Weight decay that is added to the gradient.
double l2_penalty(const ShampooOptions& o);
// Weight decay that is subtracted from the parameter.
double decoupled_decay(const ShampooOptions& o);
// Decay of the grafted method's second moment; 1: a plain sum.
double moment_beta(const ShampooOptions& o);
// Whether grafting keeps a second moment of its own.
bool uses_second_moment(const ShampooOptions& o);
RootRule root_rule(const ShampooOptions& o);

enum class ParameterRule : uint8_t {
  kMatrices,  // preconditioned by the roots of its blocks
  kDiagonal,  // m (a / c + eps)^(-1/2), with a diagonal of statistics
  kGrafted,   // the direction of the grafted method, with no state but that method's
};

// The rule of a parameter with dimensions from merged_dims(). A parameter excluded from
// preconditioning takes the direction of the grafted method if that has a second moment, else the
// diagonal rule.
ParameterRule parameter_rule(const ShampooOptions& o, at::IntArrayRef dims);

// What a step makes of a tensor p.
enum class Role : uint8_t {
  kParameter,  // p <- p - lr d, with blocks of merged_dims()
  kDirection,  // p <- -lr d, with one block of the dimensions of the tensor
};

// The same for the shape of the parameter itself.
ParameterRule rule_of_shape(const ShampooOptions& o, at::IntArrayRef shape,
                            Role role = Role::kParameter);

// The name is "preconditioned", "diagonal" or that of the grafted method. The detail gives the
// blocks and the exponent, or why no matrices precondition the parameter.
BlockedPlan::Rule describe_rule(const ShampooOptions& o, at::IntArrayRef shape);

// The blocks of a parameter; none if no matrices precondition it.
Blocking shampoo_blocking(const ShampooOptions& o, at::IntArrayRef shape,
                          Role role = Role::kParameter);
// The same for each parameter.
std::vector<Blocking> make_blockings(const ShampooOptions& o, at::TensorList params,
                                     Role role = Role::kParameter);

}  // namespace torchium::optim::detail
