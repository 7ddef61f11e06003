#include "gradients/capture/graph_edges.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>

namespace torchium::gradients::detail {
namespace {

using torch::autograd::Node;
// By the parameter's node or that of a copy of it.
using Consumers = std::unordered_map<const Node*, std::vector<const Node*>>;

int64_t count_edges(const Consumers& consumers, const Node* node) {
  int64_t count = 0;
  for (const Node* consumer : consumers.at(node)) {
    count += consumers.count(consumer) == 0 ? 1 : count_edges(consumers, consumer);
  }
  return count;
}

}  // namespace

std::vector<int64_t> backward_pass_edges(at::TensorList params) {
  std::vector<int64_t> counts(params.size(), 0);
  const auto* graph = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (graph == nullptr) {
    return counts;
  }
  Consumers consumers;
  std::vector<const Node*> leaves;
  for (const auto& param : params) {
    leaves.push_back(torch::autograd::impl::try_get_grad_accumulator(param).get());
    consumers[leaves.back()];
  }
  for (const Node* node : *graph) {
    if (dynamic_cast<const torch::autograd::generated::ToCopyBackward0*>(node) != nullptr) {
      consumers[node];
    }
  }
  for (const Node* node : *graph) {
    for (const auto& edge : node->next_edges()) {
      const auto found = consumers.find(edge.function.get());
      if (edge.is_valid() && found != consumers.end()) {
        found->second.push_back(node);
      }
    }
  }
  for (size_t i = 0; i < params.size(); ++i) {
    counts[i] = leaves[i] == nullptr ? 0 : count_edges(consumers, leaves[i]);
  }
  return counts;
}

}  // namespace torchium::gradients::detail
