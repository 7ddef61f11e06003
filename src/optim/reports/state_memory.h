// Bytes of the state of one parameter.
#pragma once

#include "optim/core/parameter_state.h"
#include "torchium/optim/memory_report.h"

namespace torchium::optim::detail {

StateMemory memory_of(const ParameterState& state);

}  // namespace torchium::optim::detail
