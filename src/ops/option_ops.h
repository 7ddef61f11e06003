// Options of an optimizer as they come from Python.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>

namespace torchium::ops {

// `values`: a tuple of names and values in turns. Leaves out what is no option.
std::shared_ptr<const torch::optim::OptimizerOptions> options_from(const std::string& optimizer,
                                                                   const c10::IValue& values);

}  // namespace torchium::ops
