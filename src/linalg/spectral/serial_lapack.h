// LAPACK on one thread.
#pragma once

#include <cstdint>

namespace torchium::linalg::detail {

// LAPACK and BLAS on the calling thread take one thread while it lives. In a parallel region MKL,
// whose number of threads torch sets permanently, hands parts of a matrix to threads that never
// come: above n = 512 eigenvectors would be garbage.
class SerialLapack {
 public:
  // Up to this order LAPACK gains nothing from threads and loses time waiting for them.
  static constexpr int64_t kLargestOrder = 128;

  SerialLapack();
  ~SerialLapack();
  SerialLapack(const SerialLapack&) = delete;
  SerialLapack& operator=(const SerialLapack&) = delete;

  static bool is_possible();

 private:
  int before_;
};

}  // namespace torchium::linalg::detail
