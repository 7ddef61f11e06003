// Finds uses of parameters in an autograd graph that no capture has recorded.
#pragma once

#include "gradients/capture/graph_node.h"
#include "gradients/capture/operator_capture.h"

#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <memory>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace torchium::gradients::detail {

struct PendingCall;

// The autograd nodes of captured calls; keeps none of them alive.
class CapturedNodes {
 public:
  using Map = std::unordered_map<const torch::autograd::Node*, std::shared_ptr<PendingCall>>;

  // The operators of the call lie between this node, its input and its parameters.
  void add(const NodePointer& node, const std::shared_ptr<PendingCall>& call);
  // Those that still exist.
  Map alive() const;

 private:
  struct Entry {
    WeakNode node;
    std::weak_ptr<PendingCall> call;
  };
  std::vector<Entry> entries_;
  size_t next_cleaning_ = 64;
};

// Positions of the parameters that a graph reaches from `roots` in another way than as weight or
// bias of a captured call.
std::set<int64_t> find_uncaptured(const OperatorCapture::State& capture,
                                  const CapturedNodes::Map& captured,
                                  const std::vector<torch::autograd::Node*>& roots);

// Where the graph of a running backward pass begins. The engine lists all of its nodes except a
// single first one; `running` is a candidate for that.
std::vector<torch::autograd::Node*> roots_of(
    const std::unordered_set<torch::autograd::Node*>& nodes,
    const std::vector<torch::autograd::Node*>& running);

}  // namespace torchium::gradients::detail
