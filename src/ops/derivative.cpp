#include "ops/derivative.h"

#include "gradients/capture/graph_node.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <mutex>
#include <type_traits>
#include <vector>

namespace torchium::ops {
namespace {

using gradients::detail::NodePointer;
using torch::autograd::Node;
using torch::autograd::SavedVariable;

template <typename Pointer>
Pointer owner(auto* node) {
  if constexpr (std::is_constructible_v<Pointer, Node*, void (*)(Node*)>) {
    return Pointer(node, [](auto* owned) { deleteNode(owned); });
  } else {
    return Pointer::unsafe_steal_from_new(node);
  }
}

class FormulaNode : public Node {
 public:
  FormulaNode(const Derivative& derivative, const variable_list& saved)
      : name_(derivative.name), backward_(derivative.backward) {
    for (const at::Tensor& tensor : saved) {
      saved_.emplace_back(tensor, /*is_output=*/false);
    }
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list saved;
    for (const SavedVariable& variable : saved_) {
      saved.push_back(variable.unpack());
    }
    std::vector<bool> wanted;
    for (size_t i = 0; i < num_outputs(); ++i) {
      wanted.push_back(task_should_compute_output(i));
    }
    return gradients[0].defined() ? backward_(gradients[0], saved, wanted)
                                  : variable_list(num_outputs());
  }

  std::string name() const override { return name_; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& variable : saved_) {
      variable.reset_data();
    }
  }

 private:
  std::string name_;
  decltype(Derivative::backward) backward_;
  std::vector<SavedVariable> saved_;
};

bool requires_grad(const variable_list& inputs) {
  return c10::GradMode::is_enabled() &&
         std::any_of(inputs.begin(), inputs.end(),
                     [](const at::Tensor& input) { return input.requires_grad(); });
}

variable_list without_tangents(const variable_list& tensors) {
  variable_list result;
  for (const at::Tensor& tensor : tensors) {
    result.push_back(has_tangent(tensor) ? tensor._fw_primal(/*level=*/0) : tensor);
  }
  return result;
}

}  // namespace

bool needs_derivative(const variable_list& inputs) {
  return requires_grad(inputs) || std::any_of(inputs.begin(), inputs.end(), has_tangent);
}

at::Tensor with_derivative(at::Tensor result, const variable_list& inputs,
                           const variable_list& saved, const Derivative& derivative) {
  if (requires_grad(inputs)) {
    const auto node = owner<NodePointer>(new FormulaNode(derivative, saved));
    node->set_next_edges(torch::autograd::collect_next_edges(inputs));
    torch::autograd::set_history(result, node);
  }
  if (std::any_of(inputs.begin(), inputs.end(), has_tangent)) {
    variable_list tangents;
    for (const at::Tensor& input : inputs) {
      tangents.push_back(input.defined() ? input._fw_grad(/*level=*/0) : at::Tensor());
    }
    result._set_fw_grad(derivative.forward(tangents, without_tangents(saved)), /*level=*/0,
                        /*is_inplace_op=*/false);
  }
  return result;
}

void refuse_backward(const variable_list& inputs, variable_list& outputs,
                     const std::string& message) {
  if (!requires_grad(inputs)) {
    return;
  }
  for (at::Tensor& output : outputs) {
    const auto node = owner<NodePointer>(
        new torch::autograd::Error(message, torch::autograd::collect_next_edges(inputs)));
    torch::autograd::set_history(output, node);
  }
}

}  // namespace torchium::ops
