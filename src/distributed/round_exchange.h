// Brings tensors of any sizes and dtypes from the ranks that have them to those that need them, in
// rounds, so that few of them are in memory at a time.
#pragma once

#include "distributed/communicator.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace torchium::distributed {

// A tensor that one rank has and one needs, which may be the same.
struct Message {
  int64_t from = 0, to = 0;
  size_t round = 0;
  at::ScalarType dtype = at::kByte;
  std::vector<int64_t> sizes;

  int64_t bytes() const;
};

// Who takes what, and when.
struct Assignment {
  std::vector<int64_t> owners;  // of each part
  std::vector<size_t> rounds;   // of each part
  size_t round_count = 0;
};
// The owners of parts with these costs, so that all ranks have about the same work (longest
// processing time). An owner gets parts of at most `most_bytes` together in a round, or one part.
Assignment assign_parts(const std::vector<int64_t>& costs, const std::vector<int64_t>& bytes,
                        int64_t ranks, int64_t most_bytes);

// Calls on_arrival(round, tensors) with the messages that have come to this rank in a round, its
// own ones included, by their positions in `messages`; those of the next round travel meanwhile.
// All ranks give the same messages; own[i]: the tensor of message i, where it comes from this rank.
void exchange_in_rounds(
    const Communicator& ranks, const std::vector<Message>& messages, size_t rounds,
    const std::vector<at::Tensor>& own, c10::Device device,
    const std::function<void(size_t round, const std::vector<at::Tensor>& tensors)>& on_arrival);

}  // namespace torchium::distributed
