// Puts the matrices of parameter states into stacks (stacks.h).
#pragma once

#include "optim/stacks.h"
#include "torchium/optim/second_order_optimizer.h"

#include <functional>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// The name of a parameter in messages, by its position in a list.
using ParamNames = std::function<std::string(size_t)>;

// Makes the matrices of `states` views of `stacks`, whose layout counts parameters in that order,
// and copies the values they had. A state without `step` is new and takes the initial values.
// Throws c10::ValueError, and changes nothing, for matrices that do not fit.
void move_into_stacks(const MatrixStacks& stacks, const std::vector<MatrixParamState*>& states,
                      const ParamNames& names);

// Throws c10::ValueError unless `value` has the shape and the kind (floating point or integer) of
// `needed`. `key` and `param` name it in the message.
void check_fits(const at::Tensor& value, const at::Tensor& needed, const std::string& key,
                const std::string& param);

}  // namespace torchium::optim::detail
