#include "gradients/capture/uncaptured_calls.h"

#include "gradients/capture/capture_state.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>

namespace torchium::gradients::detail {
namespace {

using torch::autograd::Node;

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

// The position of the parameter in which the node accumulates; -1: there is none, or it is not
// ours.
int64_t accumulates_in(const OperatorCapture::State& capture, const Node* node) {
  const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
  return leaf == nullptr ? -1 : capture.position(leaf->variable);
}

// The next edges of the graph after a captured call, without its weight and bias.
void append_behind_use(const OperatorCapture::State& capture, const CapturedNodes::Map& captured,
                       const Node& start, const PendingCall& call, std::vector<Node*>& nodes) {
  const auto input = call.input_node.lock();
  std::unordered_set<const Node*> seen{&start};
  std::vector<Node*> within;
  append_next(start, within);
  while (!within.empty()) {
    Node* node = take_last(within);
    if (!seen.insert(node).second) {
      continue;
    }
    const int64_t param = accumulates_in(capture, node);
    if (node == input.get() || captured.count(node) != 0) {
      nodes.push_back(node);
    } else if (param < 0) {
      append_next(*node, within);
    } else if ((param != call.layer.weight && param != call.layer.bias) ||
               param == call.input_position) {
      nodes.push_back(node);
    }
  }
}

}  // namespace

void CapturedNodes::add(const NodePointer& node, const std::shared_ptr<PendingCall>& call) {
  if (entries_.size() >= next_cleaning_) {
    std::erase_if(entries_,
                  [](const auto& entry) { return entry.node.expired() || entry.call.expired(); });
    next_cleaning_ = std::max<size_t>(64, 2 * entries_.size());
  }
  entries_.push_back({node, call});
}

CapturedNodes::Map CapturedNodes::alive() const {
  Map result;
  for (const auto& entry : entries_) {
    const auto node = entry.node.lock();
    auto call = entry.call.lock();
    if (node != nullptr && call != nullptr) {
      result[node.get()] = std::move(call);
    }
  }
  return result;
}

std::set<int64_t> find_uncaptured(const OperatorCapture::State& capture,
                                  const CapturedNodes::Map& captured,
                                  const std::vector<Node*>& roots) {
  std::set<int64_t> found;
  std::unordered_set<const Node*> seen;
  std::vector<Node*> waiting = roots;
  while (!waiting.empty()) {
    Node* node = take_last(waiting);
    if (!seen.insert(node).second) {
      continue;
    }
    const int64_t param = accumulates_in(capture, node);
    if (param >= 0) {
      found.insert(param);
    }
    const auto call = captured.find(node);
    if (call != captured.end()) {
      append_behind_use(capture, captured, *node, *call->second, waiting);
    } else {
      append_next(*node, waiting);
    }
  }
  return found;
}

std::vector<Node*> roots_of(const std::unordered_set<Node*>& nodes,
                            const std::vector<Node*>& running) {
  std::unordered_set<Node*> roots = nodes;
  roots.insert(running.begin(), running.end());
  std::vector<Node*> reached;
  for (const Node* node : roots) {
    append_next(*node, reached);
  }
  for (Node* node : reached) {
    roots.erase(node);
  }
  return {roots.begin(), roots.end()};
}

}  // namespace torchium::gradients::detail
