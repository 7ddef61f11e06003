// A step of the parameters of all groups together.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <unordered_map>
#include <vector>

namespace torchium::optim::detail {

// The parameters that have a gradient, in the order of the groups. All lists have one entry a
// parameter.
struct JointStep {
  std::vector<at::Tensor> params;
  std::vector<const torch::optim::OptimizerOptions*> options;  // of its group
  std::vector<at::Tensor> lrs;                                 // 0-dim, one tensor a group
  std::unordered_map<const at::TensorImpl*, int64_t> positions;

  // -1: it has no gradient.
  int64_t position(const at::Tensor& param) const {
    const auto found =
        param.defined() ? positions.find(param.unsafeGetTensorImpl()) : positions.end();
    return found == positions.end() ? -1 : found->second;
  }
};

}  // namespace torchium::optim::detail
