#include "optim/shampoo/shampoo_rules.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <sstream>
#include <utility>

namespace torchium::optim::detail {
namespace {

bool is_too_long(const ShampooOptions& o, int64_t dim) {
  return o.max_preconditioned_dim().has_value() && dim > *o.max_preconditioned_dim();
}

// "4 blocks 1024x1024, 2 blocks 1024x512, exponent -1/4"
std::string describe_blocks(const ShampooOptions& o, const Blocking& blocking) {
  if (blocking.order() == 0) {
    return "order 0, without matrices";
  }
  std::ostringstream text;
  for (const auto& shape : blocking.shapes) {
    const int64_t count = shape.count();
    text << count << (count == 1 ? " block " : " blocks ");
    for (size_t i = 0; i < shape.sizes.size(); ++i) {
      text << (i == 0 ? "" : "x") << shape.sizes[i];
    }
    text << ", ";
  }
  text << "exponent ";
  if (o.exponent().has_value()) {
    text << *o.exponent();
  } else {
    text << "-1/" << 2 * blocking.order();
  }
  return text.str();
}

std::vector<int64_t> dims_of(const ShampooOptions& o, at::IntArrayRef shape, Role role) {
  return role == Role::kParameter
             ? merged_dims(shape, o.block_size(), o.merge_dims(), o.target_order())
             : shape.vec();
}

// Why no matrices precondition a parameter.
std::string describe_exception(const ShampooOptions& o, const std::vector<int64_t>& dims) {
  if (!o.preconditioned()) {
    return "preconditioned is off";
  }
  const auto longest = std::max_element(dims.begin(), dims.end());
  if (longest != dims.end() && is_too_long(o, *longest)) {
    return c10::str("dimension ", *longest, " above max_preconditioned_dim ",
                    *o.max_preconditioned_dim());
  }
  return std::find(dims.begin(), dims.end(), 0) != dims.end() ? "no elements" : "order 0 or 1";
}

// Whether a step by the diagonal, of the length that the grafted method has, is the step of that
// method, as in an optimizer of from_adamw().
bool takes_grafted_step(const ShampooOptions& o) {
  return uses_second_moment(o) && moment_beta(o) == beta2(o) &&
         o.eps() == o.grafting_eps() * o.grafting_eps();
}

}  // namespace

double l2_penalty(const ShampooOptions& o) {
  return o.decoupled_weight_decay() ? 0.0 : o.weight_decay();
}

double decoupled_decay(const ShampooOptions& o) {
  return o.decoupled_weight_decay() ? o.weight_decay() : 0.0;
}

double moment_beta(const ShampooOptions& o) {
  return o.grafting() == "adagrad"
             ? 1.0
             : o.grafting_beta2().value_or(beta2(o) == 1.0 ? 0.999 : beta2(o));
}

bool uses_second_moment(const ShampooOptions& o) {
  return o.grafting().has_value() && *o.grafting() != "sgd";
}

RootRule root_rule(const ShampooOptions& o) {
  return {o.eps(), o.relative_eps(), o.exponent(), o.root_method(), o.exponent_warmup()};
}

ParameterRule parameter_rule(const ShampooOptions& o, at::IntArrayRef dims) {
  const bool excluded =
      !o.preconditioned() ||
      std::any_of(dims.begin(), dims.end(), [&](int64_t n) { return is_too_long(o, n); });
  if (excluded && uses_second_moment(o)) {
    return ParameterRule::kGrafted;
  }
  const bool is_vector = dims.size() <= 1 && o.preconditioner_1d() == "diagonal";
  const bool is_empty = std::find(dims.begin(), dims.end(), 0) != dims.end();
  return excluded || is_vector || is_empty ? ParameterRule::kDiagonal : ParameterRule::kMatrices;
}

ParameterRule rule_of_shape(const ShampooOptions& o, at::IntArrayRef shape, Role role) {
  return parameter_rule(o, dims_of(o, shape, role));
}

BlockedPlan::Rule describe_rule(const ShampooOptions& o, at::IntArrayRef shape) {
  const auto dims = dims_of(o, shape, Role::kParameter);
  switch (parameter_rule(o, dims)) {
    case ParameterRule::kMatrices:
      return {"preconditioned", describe_blocks(o, make_blocking(dims, o.block_size()))};
    case ParameterRule::kDiagonal:
      return {"diagonal",
              describe_exception(o, dims) +
                  (takes_grafted_step(o) ? ", takes the step of " + *o.grafting() : "")};
    case ParameterRule::kGrafted:
      return {*o.grafting(), describe_exception(o, dims)};
  }
  TORCH_INTERNAL_ASSERT(false, "a rule that is not known");
}

Blocking shampoo_blocking(const ShampooOptions& o, at::IntArrayRef shape, Role role) {
  auto dims = dims_of(o, shape, role);
  return parameter_rule(o, dims) == ParameterRule::kMatrices
             ? make_blocking(std::move(dims), o.block_size())
             : Blocking{std::move(dims), {}};
}

std::vector<Blocking> make_blockings(const ShampooOptions& o, at::TensorList params, Role role) {
  std::vector<Blocking> blockings;
  blockings.reserve(params.size());
  for (const at::Tensor& param : params) {
    blockings.push_back(shampoo_blocking(o, param.sizes(), role));
  }
  return blockings;
}

}  // namespace torchium::optim::detail
