#include "gradients/capture/uncaptured_calls.h"

#include "gradients/capture/call_gradients.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace torchium::gradients::detail {
namespace {

namespace autograd = torch::autograd;
using autograd::Node;

void append_next(const Node& node, std::vector<Node*>& nodes) {
  for (const auto& edge : node.next_edges()) {
    if (edge.is_valid()) {
      nodes.push_back(edge.function.get());
    }
  }
}

Node* take_last(std::vector<Node*>& nodes) {
  Node* node = nodes.back();
  nodes.pop_back();
  return node;
}

// The leaf in which the node accumulates; null: it is another operator.
at::TensorImpl* leaf_of(const Node* node) {
  const auto* accumulation = dynamic_cast<const autograd::AccumulateGrad*>(node);
  return accumulation == nullptr ? nullptr : accumulation->variable.unsafeGetTensorImpl();
}

// Where the graph of the running backward pass begins. The engine lists all of its nodes except a
// single first one; `candidates` may include that.
std::vector<Node*> roots_of(const std::unordered_set<Node*>& nodes,
                            const std::vector<Node*>& candidates) {
  std::unordered_set<Node*> roots = nodes;
  roots.insert(candidates.begin(), candidates.end());
  std::vector<Node*> reached;
  for (const Node* node : roots) {
    append_next(*node, reached);
  }
  for (Node* node : reached) {
    roots.erase(node);
  }
  return {roots.begin(), roots.end()};
}

}  // namespace

bool accumulates(const Node* node) {
  const auto* executed = autograd::get_current_graph_task_exec_info();
  if (executed == nullptr || executed->empty()) {  // backward() of everything
    return true;
  }
  const auto found = executed->find(const_cast<Node*>(node));
  return found != executed->end() && found->second.needed_;
}

void UncapturedCalls::add(const autograd::Edge& output, std::shared_ptr<const CallEdges> call) {
  add({output.function, output.input_nr, std::move(call)});
}

void UncapturedCalls::add_node(const NodePointer& node, std::shared_ptr<const CallEdges> call) {
  add({node, std::nullopt, std::move(call)});
}

void UncapturedCalls::add(Entry entry) {
  if (entries_.size() >= next_cleaning_) {
    std::erase_if(entries_, [](const Entry& entry) { return entry.output.expired(); });
    next_cleaning_ = std::max<size_t>(64, 2 * entries_.size());
  }
  entries_.push_back(std::move(entry));
}

UncapturedCalls::Captured UncapturedCalls::alive() const {
  Captured captured;
  for (const Entry& entry : entries_) {
    if (const auto node = entry.output.lock()) {
      captured[node.get()] = entry.call;
    }
  }
  return captured;
}

void UncapturedCalls::search(const CallEdges* reached) {
  const auto* graph = autograd::get_current_graph_task_nodes_in_graph();
  if (graph == nullptr || !searched_passes_.insert(autograd::get_current_graph_task_id()).second) {
    return;
  }
  const Captured captured = alive();
  std::vector<Node*> candidates;
  for (const auto& [node, call] : captured) {
    if (call.get() == reached) {
      candidates.push_back(const_cast<Node*>(node));
    }
  }
  const Leaves leaves = walk(captured, roots_of(*graph, candidates));
  for (const Node* node : leaves.others) {
    if (accumulates(node)) {
      auto* leaf = leaf_of(node);
      searched_.insert(leaf);
      found_.insert_or_assign(leaf, c10::weak_intrusive_ptr<at::TensorImpl>(
                                        c10::intrusive_ptr<at::TensorImpl>::reclaim_copy(leaf)));
    }
  }
  for (const Node* node : leaves.of_calls) {
    if (accumulates(node) && searched_.insert(leaf_of(node)).second) {
      found_.erase(leaf_of(node));
    }
  }
}

std::vector<at::Tensor> UncapturedCalls::found() const {
  std::vector<at::Tensor> params;
  for (const auto& [leaf, weak] : found_) {
    if (auto param = weak.lock()) {
      params.emplace_back(std::move(param));
    }
  }
  return params;
}

bool UncapturedCalls::has_found(const at::Tensor& param) const {
  return param.defined() && found_.count(param.unsafeGetTensorImpl()) != 0;
}

void UncapturedCalls::forget() {
  searched_passes_.clear();
  searched_.clear();
}

std::unordered_set<const at::TensorImpl*> UncapturedCalls::find(const at::Tensor& loss) const {
  std::unordered_set<const at::TensorImpl*> found;
  if (loss.requires_grad()) {
    const auto root = autograd::impl::gradient_edge(loss).function;
    for (const Node* node : walk(alive(), {root.get()}).others) {
      found.insert(leaf_of(node));
    }
  }
  return found;
}

std::vector<CapturedOutput> UncapturedCalls::calls_of(const at::Tensor& outputs) const {
  const auto nodes = nodes_of(outputs);
  std::vector<CapturedOutput> calls;
  for (const Entry& entry : entries_) {
    const auto node = entry.output.lock();
    if (entry.index && node != nullptr && nodes.count(node.get()) != 0) {
      calls.push_back({autograd::Edge(node, *entry.index), entry.call});
    }
  }
  return calls;
}

UncapturedCalls::Leaves UncapturedCalls::walk(const Captured& captured,
                                              std::vector<Node*> waiting) {
  Leaves leaves;
  std::unordered_set<const Node*> seen;
  while (!waiting.empty()) {
    Node* node = take_last(waiting);
    if (!seen.insert(node).second) {
      continue;
    }
    const auto call = captured.find(node);
    if (call != captured.end()) {
      walk_call(captured, *node, *call->second, waiting, leaves);
    } else if (leaf_of(node) != nullptr) {
      leaves.others.insert(node);
    } else {
      append_next(*node, waiting);
    }
  }
  return leaves;
}

// Adds what follows a captured call in the graph to `waiting`, and its weight and bias to `leaves`.
void UncapturedCalls::walk_call(const Captured& captured, const Node& output, const CallEdges& call,
                                std::vector<Node*>& waiting, Leaves& leaves) {
  const auto input = call.input_node.lock();
  std::unordered_set<const Node*> seen{&output};
  std::vector<Node*> within;
  append_next(output, within);
  while (!within.empty()) {
    Node* node = take_last(within);
    if (!seen.insert(node).second) {
      continue;
    }
    const auto* leaf = leaf_of(node);
    const bool is_own =
        leaf == call.weight || leaf == call.bias ||
        std::find(call.others.begin(), call.others.end(), leaf) != call.others.end();
    if (node == input.get() || captured.count(node) != 0) {
      waiting.push_back(node);
    } else if (leaf == nullptr) {
      append_next(*node, within);
    } else if (leaf != call.leaf_input && is_own) {
      leaves.of_calls.insert(node);
    } else {
      waiting.push_back(node);
    }
  }
}

}  // namespace torchium::gradients::detail
