#include "distributed/update_exchange.h"

#include "distributed/buffer_layout.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace torchium::distributed {

UpdateExchange::UpdateExchange(const Communicator& communicator, const std::vector<Part>& parts,
                               at::ScalarType dtype, at::ScalarType comm_dtype,
                               int64_t bucket_bytes, c10::Device device)
    : communicator_(communicator), comm_dtype_(comm_dtype), own_(parts.size()) {
  // Every rank receives as much from each.
  const int64_t most =
      bucket_bytes / static_cast<int64_t>(c10::elementSize(comm_dtype)) / communicator.size();
  struct Filled {
    size_t bucket = 0;
    int64_t elements = 0;
  };
  std::vector<Filled> filled(communicator.size());  // of each rank
  for (size_t i = 0; i < parts.size(); ++i) {
    auto& [bucket, elements] = filled[parts[i].owner];
    if (elements > 0 && elements + parts[i].elements > most) {
      ++bucket;
      elements = 0;
    }
    if (bucket == buckets_.size()) {
      buckets_.emplace_back();
    }
    buckets_[bucket].places.push_back({i, parts[i].owner, elements, parts[i].elements});
    elements += aligned(parts[i].elements);
    buckets_[bucket].length = std::max(buckets_[bucket].length, elements);
  }
  int64_t total = 0, longest = 0;
  for (Bucket& bucket : buckets_) {
    bucket.begin = total;
    total += bucket.length;
    longest = std::max(longest, bucket.length);
  }
  slots_ = BucketSlots(buckets_.size(), longest, communicator.size() * longest, dtype, comm_dtype,
                       device);
  buffer_ = at::zeros({total}, at::TensorOptions(device).dtype(dtype));
  for (const Bucket& bucket : buckets_) {
    for (const Place& place : bucket.places) {
      if (place.owner == communicator.rank()) {
        own_[place.part] = buffer_.narrow(0, bucket.begin + place.offset, place.elements);
      }
    }
  }
}

void UpdateExchange::clear_own() { buffer_.zero_(); }

void UpdateExchange::run(const std::function<void(const std::vector<Update>&)>& take) const {
  const auto received = [&](size_t k) {
    return slots_.received(k, communicator_.size() * buckets_[k].length);
  };
  const auto begin = [&](size_t k) {
    const at::Tensor share = buffer_.narrow(0, buckets_[k].begin, buckets_[k].length);
    return communicator_.begin_all_gather(slots_.packed(k, share), received(k));
  };
  run_buckets(buckets_.size(), begin, [&](size_t k) {
    const at::Tensor all = received(k);
    std::vector<Update> updates;
    for (const Place& place : buckets_[k].places) {
      const int64_t offset = place.owner * buckets_[k].length + place.offset;
      updates.push_back({place.part, all.narrow(0, offset, place.elements)});
    }
    take(updates);
  });
}

}  // namespace torchium::distributed
