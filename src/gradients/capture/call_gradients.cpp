#include "gradients/capture/call_gradients.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

namespace torchium::gradients::detail {

namespace autograd = torch::autograd;

std::unordered_set<const autograd::Node*> nodes_of(const at::Tensor& outputs) {
  std::unordered_set<const autograd::Node*> seen;
  const auto root = autograd::impl::gradient_edge(outputs).function;
  std::vector<const autograd::Node*> waiting;
  if (root != nullptr) {
    waiting.push_back(root.get());
  }
  while (!waiting.empty()) {
    const autograd::Node* node = waiting.back();
    waiting.pop_back();
    if (seen.insert(node).second) {
      for (const auto& edge : node->next_edges()) {
        if (edge.is_valid()) {
          waiting.push_back(edge.function.get());
        }
      }
    }
  }
  return seen;
}

std::vector<at::Tensor> gradients_at(const autograd::edge_list& edges, const at::Tensor& outputs,
                                     const at::Tensor& vector, bool keep_graph) {
  return autograd::Engine::get_default_engine().execute(
      {autograd::impl::gradient_edge(outputs)}, {vector}, keep_graph, /*create_graph=*/false,
      /*accumulate_grad=*/false, edges);
}

}  // namespace torchium::gradients::detail
