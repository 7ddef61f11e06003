// Sums of tensors over all ranks, in buckets.
#pragma once

#include "distributed/communicator.h"
#include "torchium/export.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::distributed {

// Adds up the values of all ranks, which give the same tensors: contiguous, of any dtypes. They
// travel in their dtype, at most `bucket_bytes` at a time, or one tensor if that is larger: one
// bucket is packed while the last one travels. Does not wait for a GPU.
TORCHIUM_API void sum_in_buckets(const Communicator& ranks, const std::vector<at::Tensor>& tensors,
                                 int64_t bucket_bytes);

}  // namespace torchium::distributed
