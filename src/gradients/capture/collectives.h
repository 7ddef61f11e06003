// Detects exchanges of tensors with other processes.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>

namespace torchium::gradients::detail {

// How many processes take part in an observed call. 1 unless it is an operator of c10d on a
// c10d::ProcessGroup (its methods call these).
int64_t processes_of(const at::RecordFunction& function);

}  // namespace torchium::gradients::detail
