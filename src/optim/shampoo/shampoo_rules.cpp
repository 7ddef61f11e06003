#include "optim/shampoo/shampoo_rules.h"

#include "optim/blocked/blocking.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <sstream>

namespace torchium::optim::detail {
namespace {

bool is_too_long(const ShampooHyperparameters& h, int64_t dim) {
  return h.max_preconditioned_dim.has_value() && dim > *h.max_preconditioned_dim;
}

// "4 blocks 1024x1024, 2 blocks 1024x512, exponent -1/4"
std::string describe_blocks(const ShampooHyperparameters& h, const Blocking& blocking) {
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
  if (h.exponent.has_value()) {
    text << *h.exponent;
  } else {
    text << "-1/" << 2 * blocking.order();
  }
  return text.str();
}

// Why no matrices precondition a parameter.
std::string describe_exception(const ShampooHyperparameters& h, const std::vector<int64_t>& dims) {
  if (!h.preconditioned) {
    return "preconditioned is off";
  }
  const int64_t longest = *std::max_element(dims.begin(), dims.end());
  if (is_too_long(h, longest)) {
    return c10::str("dimension ", longest, " above max_preconditioned_dim ",
                    *h.max_preconditioned_dim);
  }
  return std::find(dims.begin(), dims.end(), 0) != dims.end() ? "no elements" : "order 0 or 1";
}

}  // namespace

ParameterRule parameter_rule(const ShampooHyperparameters& h, at::IntArrayRef dims) {
  const bool excluded = !h.preconditioned || std::any_of(dims.begin(), dims.end(), [&](int64_t n) {
    return is_too_long(h, n);
  });
  if (excluded && uses_second_moment(h)) {
    return ParameterRule::kGrafted;
  }
  const bool is_vector = dims.size() == 1 && h.preconditioner_1d == "diagonal";
  const bool is_empty = std::find(dims.begin(), dims.end(), 0) != dims.end();
  return excluded || is_vector || is_empty ? ParameterRule::kDiagonal : ParameterRule::kMatrices;
}

ParameterRule rule_of_shape(const ShampooHyperparameters& h, at::IntArrayRef shape) {
  return parameter_rule(h, merged_dims(shape, h.block_size, h.merge_dims));
}

RuleText describe_rule(const ShampooHyperparameters& h, at::IntArrayRef shape) {
  const auto dims = merged_dims(shape, h.block_size, h.merge_dims);
  switch (parameter_rule(h, dims)) {
    case ParameterRule::kMatrices:
      return {"preconditioned", describe_blocks(h, make_blocking(dims, h.block_size))};
    case ParameterRule::kDiagonal:
      return {"diagonal", describe_exception(h, dims)};
    case ParameterRule::kGrafted:
      return {*h.grafting, describe_exception(h, dims)};
  }
  TORCH_INTERNAL_ASSERT(false, "a rule that is not known");
}

}  // namespace torchium::optim::detail
