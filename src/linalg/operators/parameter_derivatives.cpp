#include "linalg/operators/parameter_derivatives.h"

#include <ATen/ATen.h>
#include <ATen/LegacyVmapMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <unordered_set>

namespace torchium::linalg::detail {
namespace {

// As torch.autograd.grad(is_grads_batched=True) does it. Under functorch (support/vmap_level.h),
// whose rules are more, backward passes must not call an autograd.Function without setup_context().
struct BatchedGradients {
  BatchedGradients() : level(at::impl::VmapMode::increment_nesting()) {}
  ~BatchedGradients() { at::impl::VmapMode::decrement_nesting(); }
  BatchedGradients(const BatchedGradients&) = delete;
  BatchedGradients& operator=(const BatchedGradients&) = delete;
  const int64_t level;
};

}  // namespace

void check_params(const char* function, const std::vector<at::Tensor>& params) {
  for (size_t i = 0; i < params.size(); ++i) {
    TORCH_CHECK_VALUE(params[i].defined(), function, ": params[", i, "] is an undefined tensor.");
  }
  TORCH_CHECK_VALUE(
      std::any_of(params.begin(), params.end(), [](const at::Tensor& p) { return p.numel() > 0; }),
      function, ": params has no entries; pass at least one parameter.");
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& p = params[i];
    TORCH_CHECK_VALUE(p.requires_grad(), function, ": params[", i,
                      "] does not require gradients; leave it out.");
    TORCH_CHECK_VALUE(p.scalar_type() == at::kFloat || p.scalar_type() == at::kDouble, function,
                      ": params[", i, "] is ", c10::getDtypeNames(p.scalar_type()).first,
                      "; it must be float32 or float64.");
    const auto is_p = [&](const at::Tensor& other) { return other.is_same(p); };
    TORCH_CHECK_VALUE(std::none_of(params.begin(), params.begin() + i, is_p), function, ": params[",
                      i, "] is in params twice.");
    TORCH_CHECK_VALUE(
        p.scalar_type() == params[0].scalar_type() && p.device() == params[0].device(), function,
        ": params must be of one dtype and on one device.");
  }
}

at::Tensor flat_gradient(const at::Tensor& y, const std::vector<at::Tensor>& params,
                         const at::Tensor& weights) {
  auto found = torch::autograd::grad({y}, params, {weights}, /*retain_graph=*/true,
                                     /*create_graph=*/true, /*allow_unused=*/true);
  const auto is_defined = [](const at::Tensor& x) { return x.defined(); };
  if (std::none_of(found.begin(), found.end(), is_defined)) return {};
  for (size_t i = 0; i < params.size(); ++i) {
    found[i] = (found[i].defined() ? found[i] : at::zeros_like(params[i])).flatten();
  }
  return at::cat(found);
}

bool has_group_norm(const at::Tensor& y) {
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<const torch::autograd::Node*> ahead{y.grad_fn().get()};
  while (!ahead.empty()) {
    const torch::autograd::Node* node = ahead.back();
    ahead.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    if (node->name() == "NativeGroupNormBackward0") return true;
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      ahead.push_back(edge.function.get());
    }
  }
  return false;
}

at::Tensor flat_derivatives(const at::Tensor& y, const std::vector<at::Tensor>& inputs,
                            const at::Tensor& rows, bool one_by_one) {
  if (one_by_one && rows.size(0) > 1) {
    std::vector<at::Tensor> found;
    for (const at::Tensor& row : rows.split(1)) {
      found.push_back(flat_derivatives(y, inputs, row));
    }
    return at::cat(found);
  }
  const int64_t k = rows.size(0);
  std::vector<at::Tensor> found(inputs.size());
  const auto differentiate = [&](const at::Tensor& weights) {
    found = torch::autograd::grad({y}, inputs, {weights}, /*retain_graph=*/true,
                                  /*create_graph=*/false, /*allow_unused=*/true);
  };
  if (y.requires_grad() && k == 1) {  // else it is constant in all inputs
    differentiate(rows[0]);
  } else if (y.requires_grad()) {
    const BatchedGradients vmap;
    differentiate(at::_add_batch_dim(rows.contiguous(), 0, vmap.level));
    for (at::Tensor& x : found) {
      if (x.defined()) x = at::_remove_batch_dim(x, vmap.level, k, 0);
    }
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const std::vector<int64_t> sizes{k, inputs[i].numel()};
    found[i] = found[i].defined() ? found[i].reshape(sizes) : at::zeros(sizes, rows.options());
  }
  return at::cat(found, 1);
}

}  // namespace torchium::linalg::detail
