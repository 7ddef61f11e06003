// Derivatives of operators: reverse and forward mode, and those of torch.func, whose transforms
// torch::autograd::Function refuses.
#pragma once

#include "support/derivatives.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <string>

namespace torchium::ops {

using torch::autograd::variable_list;
using torchium::detail::has_tangent;

// Whether an output that depends on one of these has a gradient or a tangent.
bool needs_derivative(const variable_list& inputs);

struct Derivative {
  const char* name;  // of the node in the graph
  // Gradients of the inputs from that of the output. `wanted`: by input; others are not used.
  std::function<variable_list(const at::Tensor& gradient, const variable_list& saved,
                              const std::vector<bool>& wanted)>
      backward;
  // Tangent of the output from those of the inputs, which are undefined where there is none.
  std::function<at::Tensor(const variable_list& tangents, const variable_list& saved)> forward;
};

// `result`, computed below autograd from the inputs, with the derivative where one of them needs
// it. `saved` is kept for it; inputs among them may be differentiated again.
at::Tensor with_derivative(at::Tensor result, const variable_list& inputs,
                           const variable_list& saved, const Derivative& derivative);

// `outputs` as tensors that depend on `inputs`, and raise `message` where that is differentiated.
void refuse_backward(const variable_list& inputs, variable_list& outputs,
                     const std::string& message);

}  // namespace torchium::ops
