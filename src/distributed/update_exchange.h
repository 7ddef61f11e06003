// Brings the updates that each rank has computed to all ranks, in buckets, stage after stage: those
// of a stage travel while the next is computed. Ranks of one host can read them from each other's
// memory; else they are gathered.
#pragma once

#include "distributed/bucket_slots.h"
#include "distributed/communicator.h"
#include "distributed/peer_memory.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace torchium::distributed {

// The parts of one buffer per rank, in a fixed order.
class UpdateExchange {
 public:
  struct Part {
    int64_t owner;
    int64_t elements;
    size_t stage = 0;
  };

  // `parts`: in the order of their stages. `dtype`: of the updates; they travel in `comm_dtype`, at
  // most `bucket_bytes` of all ranks together at a time, or one part of each if that is larger.
  // `shares_memory`: allocates, where it can, the memory of this rank's parts so that others may
  // read it, which waits for the device.
  UpdateExchange(const Communicator& communicator, const std::vector<Part>& parts,
                 at::ScalarType dtype, at::ScalarType comm_dtype, int64_t bucket_bytes,
                 c10::Device device, bool shares_memory = false);

  // The memory of a part that this rank owns: contiguous, to be filled before run().
  const at::Tensor& own(size_t part) const { return own_[part]; }

  // Whether the ranks have still to call share_memory().
  bool has_new_memory() const { return has_new_memory_; }
  // Lets the ranks read each other's parts if they can. All must call it, with all_new where the
  // memory of all is new.
  void share_memory(bool all_new);

  // Calls take(parts) for every bucket of a stage, this rank's own parts included, while the next
  // one travels. All ranks must call it for all stages in their order. The updates are valid during
  // the call, and for what it launches.
  struct Update {
    size_t part;
    at::Tensor values;  // contiguous, in comm_dtype
  };
  void run(size_t stage, const std::function<void(const std::vector<Update>&)>& take) const;

 private:
  struct Place {
    size_t part;
    int64_t owner, offset, elements;  // offset in the rank's share of the bucket
  };
  struct Bucket {
    size_t stage;
    int64_t begin = 0, length = 0;  // of each rank's share, in elements
    std::vector<Place> places = {};
    std::vector<Update> updates = {};  // where they arrive
  };
  void fill_buckets(const std::vector<Part>& parts, int64_t most);
  void place_updates();
  at::Tensor received(size_t k) const;
  std::function<void()> begin(size_t k) const;

  Communicator communicator_;
  at::ScalarType comm_dtype_;
  std::vector<Bucket> buckets_;
  BucketSlots slots_;
  at::Tensor buffer_;  // shares of all buckets
  // The same in comm_dtype, for others to read; undefined: none.
  std::unique_ptr<PeerMemory> memory_;
  at::Tensor readable_;
  bool has_new_memory_, reads_ = false;
  std::vector<at::Tensor> own_;  // views; undefined: another rank's
};

}  // namespace torchium::distributed
