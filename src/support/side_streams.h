// Streams that run beside the current one. CUDA builds only.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cuda_runtime_api.h>
#include <vector>

namespace torchium::detail {

// Up to `count` streams: the current stream of the device, and streams of this thread alone. Their
// work begins after that of the current stream so far, and the current stream goes on after theirs.
// Memory for them belongs to the current stream: it is allocated before and released after this
// object's lifetime. Works in CUDA graph captures too.
class SideStreams {
 public:
  SideStreams(c10::Device device, size_t count);
  ~SideStreams();  // joins if join() was not called
  SideStreams(const SideStreams&) = delete;
  SideStreams& operator=(const SideStreams&) = delete;

  size_t size() const { return 1 + sides_.size(); }
  cudaStream_t operator[](size_t i) const { return i == 0 ? current_ : sides_[i - 1]->stream; }
  // The current stream waits for the others. Raises c10::Error if CUDA fails.
  void join();

  struct Side {
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
  };

 private:
  cudaStream_t current_;
  std::vector<Side*> sides_;
  bool is_joined_ = false;
};

}  // namespace torchium::detail
