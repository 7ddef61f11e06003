// One look at the gradients that a rank gives, on a GPU.
#pragma once

#include "optim/core/found_inf_guard.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <vector>

namespace torchium::optim::detail {

// Whether kernels examine tensors there. Never in a build without CUDA.
bool has_scan_kernels(c10::Device device);

struct GradientScan {
  at::Tensor unfit;  // [groups], see DeviceFindings
  // Of the tensors of all groups, one after the other: the largest magnitude, as the bits of a
  // float; 0 where it does not fit.
  at::Tensor largest;
};
// Of tensors that are dense, or matrices with gaps between their rows alone.
GradientScan scan_by_kernels(const std::vector<std::vector<Examined>>& groups, c10::Device device);

}  // namespace torchium::optim::detail
