// Operators that report what an optimizer does: schemas and registration, no maths.

#include "optim/shampoo/shampoo_rules.h"

#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace torchium::ops {
namespace {

// Of each parameter: the rule, and a detail of it (optim/shampoo/shampoo_rules.h).
std::tuple<std::vector<std::string>, std::vector<std::string>> shampoo_rules(
    at::TensorList params, int64_t block_size, bool merge_dims, std::string preconditioner_1d,
    bool preconditioned, std::optional<int64_t> max_preconditioned_dim,
    std::optional<double> exponent, std::optional<std::string> grafting) {
  optim::detail::ShampooHyperparameters h;
  h.block_size = block_size;
  h.merge_dims = merge_dims;
  h.preconditioner_1d = std::move(preconditioner_1d);
  h.preconditioned = preconditioned;
  h.max_preconditioned_dim = max_preconditioned_dim;
  h.exponent = exponent;
  h.grafting = std::move(grafting);
  std::vector<std::string> rules, details;
  for (const auto& param : params) {
    auto [rule, detail] = optim::detail::describe_rule(h, param.sizes());
    rules.push_back(std::move(rule));
    details.push_back(std::move(detail));
  }
  return {std::move(rules), std::move(details)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  m.def(
      "shampoo_rules(Tensor[] params, *, int block_size, bool merge_dims, str preconditioner_1d, "
      "bool preconditioned, int? max_preconditioned_dim, float? exponent, str? grafting) "
      "-> (str[] rules, str[] details)");
}

TORCH_LIBRARY_IMPL(torchium, CompositeExplicitAutograd, m) {
  m.impl("shampoo_rules", shampoo_rules);
}

}  // namespace torchium::ops
