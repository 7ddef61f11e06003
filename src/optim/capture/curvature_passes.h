// Backward passes of the curvature of a loss through captured layer calls.
#pragma once

#include "gradients/capture/call_gradients.h"
#include "optim/capture/loss_curvature.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace torchium::optim::detail {

// ValueError if there are no calls although `outputs` come from another model: no parameter of
// which `is_known` is true is in their graph.
void check_origin(const at::Tensor& outputs, const char* optimizer,
                  const std::vector<gradients::detail::DifferentiableCall>& calls,
                  const std::function<bool(const at::Tensor&)>& is_known);

// Calls visit(k, i, call) for each column k of the curvature and each of the calls i that depends
// on it. The output gradient of `call` is J^T v, with v the column and J the Jacobian of `outputs`
// with respect to the output of the layer: the sum over k of (J^T v)(J^T v)^T is J^T H J. Keeps the
// graph.
void for_each_curvature_gradient(
    const at::Tensor& outputs, const LossCurvature& curvature,
    const std::vector<gradients::detail::DifferentiableCall>& calls,
    const std::function<void(int64_t, size_t, gradients::detail::LayerCall)>& visit);

}  // namespace torchium::optim::detail
