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
  fill_buckets(parts, bucket_bytes / static_cast<int64_t>(c10::elementSize(comm_dtype)) /
                          communicator.size());
  int64_t total = 0, longest = 0;
  for (Bucket& bucket : buckets_) {
    bucket.begin = total;
    total += bucket.length;
    longest = std::max(longest, bucket.length);
  }
  slots_ = BucketSlots(buckets_.size(), longest, communicator.size() * longest, dtype, comm_dtype,
                       device);
  buffer_ = at::zeros({total}, at::TensorOptions(device).dtype(dtype));
  for (size_t k = 0; k < buckets_.size(); ++k) {
    Bucket& bucket = buckets_[k];
    const at::Tensor all = slots_.received(k, communicator.size() * bucket.length);
    for (const Place& place : bucket.places) {
      if (place.owner == communicator.rank()) {
        own_[place.part] = buffer_.narrow(0, bucket.begin + place.offset, place.elements);
      }
      const int64_t offset = place.owner * bucket.length + place.offset;
      bucket.updates.push_back({place.part, all.narrow(0, offset, place.elements)});
    }
  }
}

// Each rank's parts, one after the other, at most `most` elements of it in a bucket.
void UpdateExchange::fill_buckets(const std::vector<Part>& parts, int64_t most) {
  struct Filled {
    size_t bucket;
    int64_t elements;
  };
  std::vector<Filled> filled;  // of each rank
  for (size_t i = 0; i < parts.size(); ++i) {
    if (buckets_.empty() || buckets_.back().stage != parts[i].stage) {
      filled.assign(communicator_.size(), {buckets_.size(), 0});
    }
    auto& [bucket, elements] = filled[parts[i].owner];
    if (elements > 0 && elements + parts[i].elements > most) {
      ++bucket;
      elements = 0;
    }
    if (bucket == buckets_.size()) {
      buckets_.push_back({.stage = parts[i].stage});
    }
    buckets_[bucket].places.push_back({i, parts[i].owner, elements, parts[i].elements});
    elements += aligned(parts[i].elements);
    buckets_[bucket].length = std::max(buckets_[bucket].length, elements);
  }
}

void UpdateExchange::clear_own() { buffer_.zero_(); }

void UpdateExchange::run(size_t stage,
                         const std::function<void(const std::vector<Update>&)>& take) const {
  const auto of_stage = std::ranges::equal_range(buckets_, stage, {}, &Bucket::stage);
  const auto first = static_cast<size_t>(of_stage.begin() - buckets_.begin());
  const auto begin = [&](size_t i) {
    const size_t k = first + i;
    const at::Tensor share = buffer_.narrow(0, buckets_[k].begin, buckets_[k].length);
    return communicator_.begin_all_gather(
        slots_.packed(k, share), slots_.received(k, communicator_.size() * buckets_[k].length));
  };
  run_buckets(of_stage.size(), begin, [&](size_t i) { take(buckets_[first + i].updates); });
}

}  // namespace torchium::distributed
