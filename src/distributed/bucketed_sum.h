// Sums of tensors over all ranks, in buckets.
#pragma once

#include "distributed/communicator.h"
#include "torchium/export.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace torchium::distributed {

// How the tensors of a bucket, of one dtype, become one tensor and are filled from it.
struct BucketPacking {
  std::function<at::Tensor(const std::vector<at::Tensor>&)> pack;
  std::function<void(const std::vector<at::Tensor>&, const at::Tensor&)> unpack;
};

// Adds up the values of all ranks, which give the same tensors: contiguous, of any dtypes. They
// travel in their dtype, at most `bucket_bytes` at a time, or one tensor if that is larger: one
// bucket is packed while the last one travels. Does not wait for a GPU. `packing`: by default of
// all elements.
TORCHIUM_API void sum_in_buckets(const Communicator& ranks, const std::vector<at::Tensor>& tensors,
                                 int64_t bucket_bytes, const BucketPacking* packing = nullptr);

}  // namespace torchium::distributed
