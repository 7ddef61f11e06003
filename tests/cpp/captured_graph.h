// A CUDA graph for tests of steps that callers capture. CUDA builds only.
#pragma once

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/cuda.h>

namespace torchium::testing {

// The graph of an action, in which autograd's threads may take part; its stream is current during
// its lifetime.
class CapturedGraph {
 public:
  template <typename Action>
  explicit CapturedGraph(Action&& action) {
    torch::cuda::synchronize();
    graph_.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    action();
    graph_.capture_end();
  }
  void replay() { graph_.replay(); }

 private:
  const c10::cuda::CUDAStreamGuard stream_{c10::cuda::getStreamFromPool()};
  at::cuda::CUDAGraph graph_;
};

}  // namespace torchium::testing
