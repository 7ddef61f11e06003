// Brings parts of tensors from one rank to another, in buckets.
#pragma once

#include "distributed/bucket_slots.h"
#include "distributed/communicator.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace torchium::distributed {

class PartExchange {
 public:
  struct Transfer {
    int64_t from, to, elements;
  };

  // All ranks give the same transfers, each between two ranks. `dtype`: of the parts; they travel
  // in `comm_dtype`, at most `bucket_bytes` to and from a rank at a time, or one part if that is
  // larger.
  PartExchange(const Communicator& communicator, const std::vector<Transfer>& transfers,
               at::ScalarType dtype, at::ScalarType comm_dtype, int64_t bucket_bytes,
               c10::Device device);

  // The memory of a part that this rank sends: contiguous, to be filled before run(). Undefined for
  // those of other ranks.
  const at::Tensor& outgoing(size_t transfer) const { return outgoing_[transfer]; }

  at::ScalarType comm_dtype() const { return comm_dtype_; }

  // Calls take() for every bucket with the parts that have arrived, while the next one travels. All
  // ranks must call it. The values are valid during the call, and for what it launches.
  struct Arrival {
    size_t transfer;
    at::Tensor values;  // contiguous, in comm_dtype
  };
  void run(const std::function<void(const std::vector<Arrival>&)>& take) const;

 private:
  struct Place {
    size_t transfer;
    int64_t offset;  // in what this rank receives
    int64_t elements;
  };
  struct Bucket {
    int64_t begin = 0, outgoing = 0, incoming = 0;  // elements
    std::vector<int64_t> sent, received;            // of each rank
    std::vector<Place> places;
    std::vector<Arrival> arrivals;  // at these
  };
  void lay_out(Bucket& bucket, const std::vector<size_t>& members,
               const std::vector<Transfer>& transfers);

  Communicator communicator_;
  at::ScalarType comm_dtype_;
  std::vector<Bucket> buckets_;
  BucketSlots slots_;
  std::vector<int64_t> offsets_;      // of the parts that this rank sends
  at::Tensor buffer_;                 // what this rank sends, bucket after bucket
  std::vector<at::Tensor> outgoing_;  // views of it
};

}  // namespace torchium::distributed
