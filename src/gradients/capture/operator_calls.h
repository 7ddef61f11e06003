// Reads the arguments of the operators that layers call.
#pragma once

#include "gradients/capture/layer_call.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <optional>

namespace torchium::gradients::detail {

// The arguments of an operator. `weight` and `bias` are the parameters themselves where a
// gradient would reach them; undefined otherwise.
struct OperatorCall {
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor input;  // as the operator received it
  LayerCall layer;   // without positions and gradient
  // The operator adds `bias` to its first operand in place, perhaps to the product of a weight.
  bool is_in_place_addition = false;
};

struct LayerOperator {
  // None: not a layer call that can be captured.
  std::optional<OperatorCall> (*read)(c10::ArrayRef<c10::IValue> arguments);
  // Layers called within do not count: their dimensions may differ from the caller's.
  bool hides_calls;
};

// By the name in the operator's schema, which is compared by its address. Null: not listed here.
const LayerOperator* find_layer_operator(const char* schema_name);

}  // namespace torchium::gradients::detail
