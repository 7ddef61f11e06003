// The message of a step on a device, where the ranks combine it without a wait: on a GPU in one
// launch each, elsewhere by PyTorch's operators. Slots: cuda_kernels/optimizer_step/message_slots.h
#pragma once

#include "torchium/export.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchium::distributed {

// Findings that are on a device, where the host cannot read them without a wait. Undefined: those
// of the host count.
struct DeviceFindings {
  at::Tensor found_inf;  // one number; not 0: skip the step
  at::Tensor unfit;      // [groups] int32: kMost minus the first unfit parameter; 0: none
  at::Tensor failure;    // one int64
};

// The numbers of the host, with what only the device knows. `groups`: how many this rank has.
TORCHIUM_API at::Tensor packed_message(const std::vector<int64_t>& host,
                                       const DeviceFindings& on_device, size_t groups,
                                       c10::Device device);
// [groups] float32: 1 where the ranks cannot take the step together, the step before has failed, or
// the step of a group is skipped; else 0.
TORCHIUM_API at::Tensor skipped_groups(const at::Tensor& message, size_t groups);
// Copies the message to `kept`, and counts in `skips`, of all groups that a message can have, the
// steps in a row that gradients have skipped. Infinities that a GradScaler has found leave the
// count as it is.
TORCHIUM_API void keep_message(const at::Tensor& message, at::Tensor& kept, at::Tensor& skips);

}  // namespace torchium::distributed
