// Operators that report the rules and the memory of an optimizer: schemas and registration, no
// maths.

#include "optim/shampoo_memory.h"
#include "optim/shampoo_rules.h"

#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace torchium::ops {
namespace {

int64_t shampoo_step_temporaries(at::TensorList params, double weight_decay, double beta1,
                                 bool decoupled_weight_decay, int64_t block_size, bool merge_dims,
                                 std::string preconditioner_1d, std::optional<std::string> grafting,
                                 std::string root_method, bool maximize,
                                 std::optional<std::string> root_dtype, bool preconditioned,
                                 std::optional<int64_t> max_preconditioned_dim) {
  optim::detail::ShampooHyperparameters h;
  h.weight_decay = weight_decay;
  h.beta1 = beta1;
  h.decoupled_weight_decay = decoupled_weight_decay;
  h.block_size = block_size;
  h.merge_dims = merge_dims;
  h.preconditioner_1d = std::move(preconditioner_1d);
  h.preconditioned = preconditioned;
  h.max_preconditioned_dim = max_preconditioned_dim;
  h.grafting = std::move(grafting);
  h.root_method = std::move(root_method);
  h.root_dtype = std::move(root_dtype);
  h.maximize = maximize;
  return optim::detail::shampoo_step_temporaries(h, params);
}

// Of each parameter: the rule, and a detail of it (optim/shampoo_rules.h).
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
      "shampoo_step_temporaries(Tensor[] params, *, float weight_decay, float beta1, "
      "bool decoupled_weight_decay, int block_size, bool merge_dims, str preconditioner_1d, "
      "str? grafting, str root_method, bool maximize, str? root_dtype=None, "
      "bool preconditioned=True, int? max_preconditioned_dim=None) -> int");
  m.def(
      "shampoo_rules(Tensor[] params, *, int block_size, bool merge_dims, str preconditioner_1d, "
      "bool preconditioned, int? max_preconditioned_dim, float? exponent, str? grafting) "
      "-> (str[] rules, str[] details)");
}

TORCH_LIBRARY_IMPL(torchium, CompositeExplicitAutograd, m) {
  m.impl("shampoo_step_temporaries", shampoo_step_temporaries);
  m.impl("shampoo_rules", shampoo_rules);
}

}  // namespace torchium::ops
