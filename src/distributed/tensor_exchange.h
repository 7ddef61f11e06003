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
  struct Parcel {
    int64_t bytes;              // parcel_bytes()
    std::vector<Route> routes;  // at most one to each rank
  };

  // All ranks give the same parcels, which travel as bytes, at most `bucket_bytes` to and from a
  // rank at a time, or one parcel if that is larger. Parcels that all go from one rank to all
  // others are gathered; else each travels where it is needed.
  TensorExchange(const Communicator& communicator, std::vector<Parcel> parcels,
                 int64_t bucket_bytes, c10::Device device);

  // Sends the tensors of parcels that this rank has to where their routes lead, and fills those
  // that it is to receive. Sizes and dtypes are the same on both sides, strides need not be. All
  // ranks must call it.
  void run(const std::function<std::vector<at::Tensor>(size_t parcel)>& tensors) const;

 private:
  int64_t rank_;
  std::vector<Parcel> parcels_;
  std::vector<std::pair<size_t, Route>> transfers_;  // with their parcels
  std::optional<UpdateExchange> gathered_;           // or
  std::optional<PartExchange> sent_;
};

// What these tensors take as a parcel.
int64_t parcel_bytes(const std::vector<at::Tensor>& tensors);

}  // namespace torchium::distributed
