#ifdef TORCHIUM_WITH_CUDA
#include "support/side_streams.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <memory>

namespace torchium::detail {
namespace {

// The capture that a stream belongs to; 0: none.
unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

// The side streams of one thread and device, kept for the next call. Streams that two threads share
// would draw work of one into a capture of the other.
class ThreadStreams {
 public:
  ThreadStreams() = default;
  ThreadStreams(const ThreadStreams&) = delete;
  ThreadStreams& operator=(const ThreadStreams&) = delete;
  ~ThreadStreams() {  // errors: the program may be at its end
    for (const auto& side : sides_) {
      cudaEventDestroy(side->event);
      cudaStreamDestroy(side->stream);
    }
  }

  SideStreams::Side* get(size_t i) {
    while (sides_.size() <= i) {
      auto side = std::make_unique<SideStreams::Side>();
      C10_CUDA_CHECK(cudaStreamCreateWithFlags(&side->stream, cudaStreamNonBlocking));
      C10_CUDA_CHECK(cudaEventCreateWithFlags(&side->event, cudaEventDisableTiming));
      sides_.push_back(std::move(side));
    }
    return sides_[i].get();
  }

 private:
  std::vector<std::unique_ptr<SideStreams::Side>> sides_;
};

}  // namespace

SideStreams::SideStreams(c10::Device device, size_t count)
    : current_(c10::cuda::getCurrentCUDAStream(device.index())) {
  thread_local std::map<c10::DeviceIndex, ThreadStreams> of_devices;
  ThreadStreams& streams = of_devices[device.index()];
  const auto capture = capture_of(current_);
  for (size_t i = 0; i + 1 < count; ++i) {
    Side* side = streams.get(i);
    const auto others = capture_of(side->stream);
    if (others == 0 || others == capture) {  // another capture of this thread may still hold it
      C10_CUDA_CHECK(cudaEventRecord(side->event, current_));
      C10_CUDA_CHECK(cudaStreamWaitEvent(side->stream, side->event));
      sides_.push_back(side);
    }
  }
}

SideStreams::~SideStreams() {
  if (!is_joined_) {
    for (const Side* side : sides_) {
      cudaEventRecord(side->event, side->stream);
      cudaStreamWaitEvent(current_, side->event);
    }
  }
}

void SideStreams::join() {
  is_joined_ = true;
  for (const Side* side : sides_) {
    C10_CUDA_CHECK(cudaEventRecord(side->event, side->stream));
    C10_CUDA_CHECK(cudaStreamWaitEvent(current_, side->event));
  }
}

}  // namespace torchium::detail
#endif
