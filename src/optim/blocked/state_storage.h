// Puts the matrices of parameter states into storage (storage.h).
#pragma once

#include "optim/blocked/block_storage.h"
#include "torchium/optim/blocked_optimizer.h"

#include <functional>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// The name of a parameter in messages, by its position in a list.
using ParamNames = std::function<std::string(size_t)>;

// Whether the matrices of a state have the numbers and shapes of `storage`, made for its parameter
// alone.
bool slots_fit(const BlockStorage& storage, const MatrixParamState& state);

// Makes the matrices of `states` views of `storage`, whose layout counts parameters in that order,
// and copies the values they had. A state without `step` is new and takes the initial values.
// Throws c10::ValueError, and changes nothing, for matrices that do not fit.
void move_into_storage(const BlockStorage& storage, const std::vector<MatrixParamState*>& states,
                       const ParamNames& names);

}  // namespace torchium::optim::detail
