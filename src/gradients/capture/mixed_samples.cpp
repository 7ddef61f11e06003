#include "gradients/capture/mixed_samples.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace torchium::gradients::detail {
namespace {

namespace nodes = torch::autograd::generated;
using torch::autograd::Node;

// Whether the node is a Normalization that took its statistics from the batch.
template <typename Normalization>
bool is_training(const Node& node) {
  const auto* normalization = dynamic_cast<const Normalization*>(&node);
  return normalization != nullptr && normalization->training;
}

bool normalises_a_batch(const Node& node) {
  const bool found = is_training<nodes::NativeBatchNormBackward0>(node) ||
                     is_training<nodes::CudnnBatchNormBackward0>(node) ||
                     is_training<nodes::MiopenBatchNormBackward0>(node) ||
                     is_training<nodes::NativeBatchNormLegitBackward0>(node) ||
                     is_training<nodes::NativeBatchNormLegitBackward1>(node);
  if (!found) {
    return false;
  }
  // instance_norm() normalises samples as channels of one, with statistics of that one.
  const auto sizes = node.input_metadata(0).shape_as_dim_vector();
  return sizes.empty() || sizes[0] != 1;
}

}  // namespace

bool backward_pass_mixes_samples() {
  const auto* graph = torch::autograd::get_current_graph_task_nodes_in_graph();
  return graph != nullptr && std::any_of(graph->begin(), graph->end(), [](const Node* node) {
           return normalises_a_batch(*node);
         });
}

}  // namespace torchium::gradients::detail
