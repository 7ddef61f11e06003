// Finds uses of parameters in a graph of autograd that no capture has seen.
#pragma once

#include "gradients/graph_node.h"
#include "gradients/operator_capture.h"

#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <memory>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace torchium::gradients::detail {

struct PendingUse;

// The nodes of autograd that captured uses have made; keeps none of them alive.
class CapturedNodes {
 public:
  using Map = std::unordered_map<const torch::autograd::Node*, std::shared_ptr<PendingUse>>;

  // The operators of the use lie between this node, its input and its parameters.
  void add(const NodePointer& node, const std::shared_ptr<PendingUse>& use);
  // Those that are still there.
  Map alive() const;

 private:
  struct Entry {
    WeakNode node;
    std::weak_ptr<PendingUse> use;
  };
  std::vector<Entry> entries_;
  size_t next_cleaning_ = 64;
};

// Positions of the parameters that a graph leads to from `roots` by another way than as weight or
// bias of a captured use.
std::set<int64_t> find_uncaptured(const OperatorCapture::State& capture,
                                  const CapturedNodes::Map& captured,
                                  const std::vector<torch::autograd::Node*>& roots);

// Where the graph of a running backward pass begins. The engine tells all its nodes but the first
// if that is a single one; `running` is one that may be it.
std::vector<torch::autograd::Node*> roots_of(
    const std::unordered_set<torch::autograd::Node*>& nodes,
    const std::vector<torch::autograd::Node*>& running);

}  // namespace torchium::gradients::detail
