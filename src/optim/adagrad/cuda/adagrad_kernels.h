// Steps of diagonal Adagrad by the kernels of a GPU, in a few launches for all parameters
// (cuda_kernels/optimizer_step/adagrad_step.h).
#pragma once

#include "optim/adagrad/adagrad_step.h"

#include <cstddef>
#include <memory>
#include <vector>

namespace torchium::optim::detail {

// Whether the kernels can take a parameter of the group: on a GPU and dense, with a float32 sum in
// the same memory layout. Never in a build without CUDA.
bool has_adagrad_kernels(const AdagradGroup& group, size_t param);

// For such parameters, by their positions in the group. `prologue` is that of the group.
std::unique_ptr<AdagradSubset> make_adagrad_kernels(const AdagradGroup& group,
                                                    const std::vector<size_t>& members,
                                                    StepPrologue& prologue);

}  // namespace torchium::optim::detail
