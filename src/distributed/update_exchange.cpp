#include "distributed/update_exchange.h"

#include "distributed/buffer_layout.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace torchium::distributed {

UpdateExchange::UpdateExchange(const Communicator& communicator, const std::vector<Part>& parts,
                               at::ScalarType dtype, at::ScalarType comm_dtype,
                               int64_t bucket_bytes, c10::Device device, bool shares_memory)
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
  has_new_memory_ = shares_memory && device.is_cuda() && communicator.size() > 1 && total > 0;
  if (has_new_memory_) {
    memory_ =
        PeerMemory::allocate(total * static_cast<int64_t>(c10::elementSize(comm_dtype)), device);
  }
  if (memory_ != nullptr) {
    readable_ = memory_->own().view(comm_dtype);
  }
  buffer_ = memory_ != nullptr && dtype == comm_dtype
                ? readable_.zero_()
                : at::zeros({total}, at::TensorOptions(device).dtype(dtype));
  for (const Bucket& bucket : buckets_) {
    for (const Place& place : bucket.places) {
      if (place.owner == communicator.rank()) {
        own_[place.part] = buffer_.narrow(0, bucket.begin + place.offset, place.elements);
      }
    }
  }
  place_updates();
}

// Where parts arrive. Own ones need not travel if others read them.
void UpdateExchange::place_updates() {
  for (size_t k = 0; k < buckets_.size(); ++k) {
    Bucket& bucket = buckets_[k];
    const at::Tensor all = received(k);
    bucket.updates.clear();
    for (const Place& place : bucket.places) {
      const bool stays = reads_ && place.owner == communicator_.rank();
      const int64_t begin = stays ? bucket.begin : place.owner * bucket.length;
      bucket.updates.push_back(
          {place.part, (stays ? readable_ : all).narrow(0, begin + place.offset, place.elements)});
    }
  }
}

void UpdateExchange::share_memory(bool all_new) {
  has_new_memory_ = false;
  reads_ = all_new && PeerMemory::share(memory_.get(), communicator_, buffer_.device());
  if (!reads_ && readable_.defined() && !readable_.is_same(buffer_)) {
    readable_.reset();
    memory_.reset();
  }
  place_updates();
}

at::Tensor UpdateExchange::received(size_t k) const {
  return slots_.received(k, communicator_.size() * buckets_[k].length);
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

// Starts to bring bucket k here.
std::function<void()> UpdateExchange::begin(size_t k) const {
  const auto& [stage, begin, length, places, updates] = buckets_[k];
  if (!reads_) {
    return communicator_.begin_all_gather(slots_.packed(k, buffer_.narrow(0, begin, length)),
                                          received(k));
  }
  const auto item = static_cast<int64_t>(c10::elementSize(comm_dtype_));
  const int64_t ranks = communicator_.size();
  std::vector<PeerMemory::Read> reads;
  for (int64_t i = 1; i < ranks; ++i) {  // each rank begins with another
    const int64_t rank = (communicator_.rank() + i) % ranks;
    reads.push_back({rank, begin * item, received(k).narrow(0, rank * length, length)});
  }
  return memory_->begin_reads(reads);
}

void UpdateExchange::run(size_t stage,
                         const std::function<void(const std::vector<Update>&)>& take) const {
  const auto of_stage = std::ranges::equal_range(buckets_, stage, {}, &Bucket::stage);
  if (of_stage.empty()) {
    return;
  }
  if (reads_) {
    if (!readable_.is_same(buffer_)) {
      const Bucket& last = of_stage.back();
      const int64_t begin = of_stage.front().begin, length = last.begin + last.length - begin;
      readable_.narrow(0, begin, length).copy_(buffer_.narrow(0, begin, length));
    }
    memory_->barrier();  // all have written
  }
  const auto first = static_cast<size_t>(of_stage.begin() - buckets_.begin());
  run_buckets(
      of_stage.size(), [&](size_t i) { return begin(first + i); },
      [&](size_t i) { take(buckets_[first + i].updates); });
  if (reads_) {
    memory_->barrier();  // all have read
  }
}

}  // namespace torchium::distributed
