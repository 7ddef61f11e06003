#include "ops/captured_graph.h"

#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace torchium::ops {
namespace {

int64_t number_of(const gradients::detail::CallEdges* call) {
  return reinterpret_cast<int64_t>(call);
}

}  // namespace

int64_t CapturedGraph::add(const at::Tensor& output, const at::Tensor& input,
                           const std::optional<at::Tensor>& weight,
                           const std::optional<at::Tensor>& bias) {
  const auto impl = [](const std::optional<at::Tensor>& tensor) {
    return tensor ? tensor->unsafeGetTensorImpl() : nullptr;
  };
  auto call = std::make_shared<gradients::detail::CallEdges>();
  call->weight = impl(weight);
  call->bias = impl(bias);
  call->leaf_input = input.is_leaf() ? impl(input) : nullptr;
  call->input_node = input.grad_fn();
  const int64_t number = number_of(call.get());
  calls_.add(torch::autograd::impl::gradient_edge(output), std::move(call));
  return number;
}

std::vector<at::Tensor> CapturedGraph::search(int64_t reached) {
  calls_.search(reinterpret_cast<const gradients::detail::CallEdges*>(reached));
  return calls_.found();
}

std::vector<int64_t> CapturedGraph::calls_of(const at::Tensor& outputs) const {
  std::vector<int64_t> numbers;
  for (const auto& [edge, call] : calls_.calls_of(outputs)) {
    numbers.push_back(number_of(call.get()));
  }
  return numbers;
}

std::unordered_map<int64_t, torch::autograd::Edge> CapturedGraph::outputs_of_calls(
    const at::Tensor& outputs) const {
  std::unordered_map<int64_t, torch::autograd::Edge> edges;
  for (const auto& [edge, call] : calls_.calls_of(outputs)) {
    edges.emplace(number_of(call.get()), edge);
  }
  return edges;
}

}  // namespace torchium::ops
