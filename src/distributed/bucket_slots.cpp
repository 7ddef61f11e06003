#include "distributed/bucket_slots.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace torchium::distributed {

BucketSlots::BucketSlots(size_t buckets, int64_t sent, int64_t received, at::ScalarType dtype,
                         at::ScalarType comm_dtype, c10::Device device) {
  const auto options = at::TensorOptions(device).dtype(comm_dtype);
  for (size_t k = 0; k < std::min(buckets, slots_.size()); ++k) {
    slots_[k].received = at::empty({received}, options);
    if (dtype != comm_dtype) {
      slots_[k].sent = at::empty({sent}, options);
    }
  }
}

at::Tensor BucketSlots::packed(size_t k, const at::Tensor& values) const {
  const at::Tensor& sent = slots_[k % slots_.size()].sent;
  return sent.defined() ? sent.narrow(0, 0, values.numel()).copy_(values) : values;
}

at::Tensor BucketSlots::received(size_t k, int64_t elements) const {
  return slots_[k % slots_.size()].received.narrow(0, 0, elements);
}

void run_buckets(size_t buckets, const std::function<std::function<void()>(size_t)>& begin,
                 const std::function<void(size_t)>& take) {
  std::function<void()> wait;
  for (size_t k = 0; k < buckets; ++k) {
    if (k == 0) {
      wait = begin(0);
    }
    wait();
    if (k + 1 < buckets) {
      wait = begin(k + 1);
    }
    take(k);
  }
}

}  // namespace torchium::distributed
