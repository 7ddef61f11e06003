// Gradients by the outputs of captured calls, without a backward pass of the user.
#pragma once

#include "gradients/capture/layer_call.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <unordered_set>
#include <vector>

namespace torchium::gradients::detail {

struct PendingCall;

// A call without a gradient, and its output in autograd's graph.
struct DifferentiableCall {
  LayerCall layer;
  torch::autograd::Edge output;
  std::shared_ptr<const PendingCall> call;
};

// The nodes of the graph of `outputs`.
std::unordered_set<const torch::autograd::Node*> nodes_of(const at::Tensor& outputs);

// The gradients of sum(vector * outputs) at edges of its graph; undefined where it does not depend
// on them. No gradient by a parameter is computed, and nothing accumulated in `.grad`.
std::vector<at::Tensor> gradients_at(const torch::autograd::edge_list& edges,
                                     const at::Tensor& outputs, const at::Tensor& vector,
                                     bool keep_graph);

}  // namespace torchium::gradients::detail
