// Finds parameters whose gradient does not come from captured layer calls alone.
#pragma once

#include "gradients/capture/graph_node.h"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace torchium::gradients::detail {

// Where the operators of a captured call end in autograd's graph: at its input and its parameters.
struct CallEdges {
  // Null: absent, or without a gradient.
  const at::TensorImpl* weight = nullptr;
  const at::TensorImpl* bias = nullptr;
  const at::TensorImpl* leaf_input = nullptr;  // the input, if it is a leaf
  WeakNode input_node;                         // that has computed the input
};

// Not thread-safe.
class UncapturedCalls {
 public:
  // Adds a node that computes the output of a captured call. Keeps no node alive.
  void add(const NodePointer& output, std::shared_ptr<const CallEdges> call);
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

 private:
  using Node = torch::autograd::Node;
  using Captured = std::unordered_map<const Node*, std::shared_ptr<const CallEdges>>;
  struct Entry {
    WeakNode output;
    std::shared_ptr<const CallEdges> call;
  };
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
