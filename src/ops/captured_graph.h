// The layer calls that Python's hooks have captured, in autograd's graph, for
// torch.classes.torchium.
#pragma once

#include "gradients/capture/uncaptured_calls.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace torchium::ops {

class CapturedGraph : public torch::CustomClassHolder {
 public:
  // A number for search() and calls_of().
  int64_t add(const at::Tensor& output, const at::Tensor& input,
              const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias);
  // The parameters that backward passes have reached outside of these calls, this one included.
  std::vector<at::Tensor> search(int64_t reached);
  // The numbers of the calls that `outputs` depends on, in the order of the calls.
  std::vector<int64_t> calls_of(const at::Tensor& outputs) const;
  // The outputs of these calls, by number.
  std::unordered_map<int64_t, torch::autograd::Edge> outputs_of_calls(
      const at::Tensor& outputs) const;
  void forget() { calls_.forget(); }

 private:
  gradients::detail::UncapturedCalls calls_;
};

}  // namespace torchium::ops
