// Buckets that travel one after the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace torchium::distributed {

// Memory of two buckets: one is in flight while the one before is used. It lasts as long as the
// exchange, so that no step allocates it while other ranks wait.
class BucketSlots {
 public:
  BucketSlots() = default;
  // `sent`, `received`: elements of the largest bucket. Values in `dtype` travel in `comm_dtype`.
  BucketSlots(size_t buckets, int64_t sent, int64_t received, at::ScalarType dtype,
              at::ScalarType comm_dtype, c10::Device device);

  // The values of bucket k as they travel.
  at::Tensor packed(size_t k, const at::Tensor& values) const;
  at::Tensor received(size_t k, int64_t elements) const;

 private:
  struct Slot {
    at::Tensor sent, received;
  };
  std::array<Slot, 2> slots_;
};

// begin(k) starts bucket k and returns the wait for it; take(k) uses what it has brought, while the
// next one travels.
void run_buckets(size_t buckets, const std::function<std::function<void()>(size_t)>& begin,
                 const std::function<void(size_t)>& take);

}  // namespace torchium::distributed
