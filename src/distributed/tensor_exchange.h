// Brings lists of tensors from one rank to others, in buckets.
#pragma once

#include "distributed/communicator.h"
#include "distributed/part_exchange.h"
#include "distributed/update_exchange.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace torchium::distributed {

class TensorExchange {
 public:
  struct Route {
    int64_t from, to;
  };
  struct Message {
    int64_t bytes;              // packed_bytes()
    std::vector<Route> routes;  // at most one to each rank
  };

  // All ranks give the same messages, which travel as bytes, at most kBucketBytes to and from a
  // rank at a time, or one message if that is larger. Messages that all go from one rank to all
  // others are gathered; else each travels where it is needed.
  TensorExchange(const Communicator& communicator, std::vector<Message> messages,
                 c10::Device device);

  // Sends the tensors of messages that this rank has to where their routes lead, and fills those
  // that it is to receive. Sizes and dtypes are the same on both sides, strides need not be. All
  // ranks must call it.
  void run(const std::function<std::vector<at::Tensor>(size_t message)>& tensors) const;

 private:
  int64_t rank_;
  std::vector<Message> messages_;
  std::vector<std::pair<size_t, Route>> transfers_;  // with their messages
  std::optional<UpdateExchange> gathered_;           // or
  std::optional<PartExchange> sent_;
};

// What these tensors take as a message.
int64_t packed_bytes(const std::vector<at::Tensor>& tensors);

}  // namespace torchium::distributed
