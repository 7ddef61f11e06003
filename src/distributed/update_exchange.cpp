#include "distributed/update_exchange.h"

#include "distributed/alignment.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace torchium::distributed {

UpdateExchange::UpdateExchange(const Communicator& communicator, const std::vector<Part>& parts,
                               at::ScalarType dtype, at::ScalarType comm_dtype,
                               int64_t bucket_bytes, c10::Device device)
    : communicator_(communicator), comm_dtype_(comm_dtype), own_(parts.size()) {
  const int64_t most =
      std::max<int64_t>(1, bucket_bytes / static_cast<int64_t>(c10::elementSize(comm_dtype)));
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
  int64_t total = 0;
  for (Bucket& bucket : buckets_) {
    bucket.begin = total;
    total += bucket.length;
  }
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

int64_t UpdateExchange::sent_bytes() const {
  return buffer_.numel() * static_cast<int64_t>(c10::elementSize(comm_dtype_));
}

void UpdateExchange::run(const std::function<void(const std::vector<Update>&)>& take) const {
  // Two slots: one bucket travels while the one before is taken.
  at::Tensor slots[2], shares[2];
  std::function<void()> wait;
  const auto begin = [&](size_t k) {
    const Bucket& bucket = buckets_[k];
    at::Tensor& slot = slots[k % 2];
    const int64_t elements = communicator_.size() * bucket.length;
    if (!slot.defined() || slot.numel() < elements) {
      slot = at::empty({elements}, buffer_.options().dtype(comm_dtype_));
    }
    shares[k % 2] = buffer_.narrow(0, bucket.begin, bucket.length).to(comm_dtype_);
    wait = communicator_.begin_gather(shares[k % 2], slot.narrow(0, 0, elements));
  };
  for (size_t k = 0; k < buckets_.size(); ++k) {
    if (k == 0) {
      begin(0);
    }
    wait();
    if (k + 1 < buckets_.size()) {
      begin(k + 1);
    }
    const Bucket& bucket = buckets_[k];
    const at::Tensor all = slots[k % 2];
    std::vector<Update> updates;
    for (const Place& place : bucket.places) {
      const int64_t begin = place.owner * bucket.length + place.offset;
      updates.push_back(
          {place.part, all.narrow(0, begin, place.elements).to(buffer_.scalar_type())});
    }
    take(updates);
  }
}

}  // namespace torchium::distributed
