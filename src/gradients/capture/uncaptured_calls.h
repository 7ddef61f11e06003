// Finds parameters whose gradient does not come from captured layer calls alone.
#pragma once

#include "gradients/capture/graph_node.h"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace torchium::gradients::detail {

struct PendingCall;

// Where the operators of a captured call end in autograd's graph: at its input and its parameters.
struct CallEdges {
  // Null: absent, or without a gradient.
  const at::TensorImpl* weight = nullptr;
  const at::TensorImpl* bias = nullptr;
  std::vector<const at::TensorImpl*> others;   // parameters of a registered layer
  const at::TensorImpl* leaf_input = nullptr;  // the input, if it is a leaf
  WeakNode input_node;                         // that has computed the input
  std::weak_ptr<PendingCall> pending;
};

// The output of a captured call in autograd's graph.
struct CapturedOutput {
  torch::autograd::Edge edge;
  std::shared_ptr<const CallEdges> call;
};

// Not thread-safe.
class UncapturedCalls {
 public:
  // Adds the output of a captured call. Keeps no node alive.
  void add(const torch::autograd::Edge& output, std::shared_ptr<const CallEdges> call);
  // Adds a node that follows the output and belongs to the call too.
  void add_node(const NodePointer& node, std::shared_ptr<const CallEdges> call);
  // Searches the graph of the running backward pass, once per pass. `reached`: the call whose
  // output the pass has just reached.
  void search(const CallEdges* reached);
  // The parameters that a backward pass has reached in another way than as weight or bias of a
  // captured call: a pass since forget() or, if none has reached the parameter since, an earlier
  // one. The last operator of the loss is not examined.
  std::vector<at::Tensor> found() const;
  bool has_found(const at::Tensor& param) const;
  void forget();

  // The parameters that `loss` depends on in such a way.
  std::unordered_set<const at::TensorImpl*> find(const at::Tensor& loss) const;
  // The captured calls that `outputs` depends on, in the order of the calls.
  std::vector<CapturedOutput> calls_of(const at::Tensor& outputs) const;

 private:
  using Node = torch::autograd::Node;
  using Captured = std::unordered_map<const Node*, std::shared_ptr<const CallEdges>>;
  struct Entry {
    WeakNode output;
    std::optional<uint32_t> index;  // of the output among those of the node; none: add_node()
    std::shared_ptr<const CallEdges> call;
  };
  void add(Entry entry);
  // Nodes that accumulate in leaves.
  struct Leaves {
    std::unordered_set<const Node*> of_calls;
    std::unordered_set<const Node*> others;
  };
  Captured alive() const;
  static Leaves walk(const Captured& captured, std::vector<Node*> waiting);
  static void walk_call(const Captured& captured, const Node& output, const CallEdges& call,
                        std::vector<Node*>& waiting, Leaves& leaves);

  std::vector<Entry> entries_;
  size_t next_cleaning_ = 64;
  // Since forget():
  std::unordered_set<int64_t> searched_passes_;
  std::unordered_set<const at::TensorImpl*> searched_;
  // Weak references keep the addresses from being reused.
  std::unordered_map<const at::TensorImpl*, c10::weak_intrusive_ptr<at::TensorImpl>> found_;
};

// Whether the running backward pass accumulates a gradient at this node of a leaf.
bool accumulates(const torch::autograd::Node* node);

}  // namespace torchium::gradients::detail
