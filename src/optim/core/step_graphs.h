// Steps of a plan as CUDA graphs: captured once, then replayed by one call of the host.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace torchium::optim::detail {

enum class GraphMode : uint8_t {
  kAuto,    // where the scratch memory of the step is small, see StepGraphs::kShareOfState
  kAlways,  // whatever the memory
  kNever,
};

// A graph holds addresses. It is replayed for gradients at the addresses that it was captured with;
// training loops mostly free and allocate them in the same order in every step. Otherwise the step
// runs as usual, and is captured again unless too many captures were never replayed. Scratch memory
// is common to all graphs and stays allocated with them.
class StepGraphs {
 public:
  explicit StepGraphs(c10::Device device);
  ~StepGraphs();
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;

  // Scratch memory that kAuto allows: this share of the bytes of state, or of the device's memory.
  static constexpr double kShareOfState = 0.05, kShareOfDevice = 0.01;

  // What run() needs of one step.
  struct Step {
    at::TensorList grads;
    int64_t key;                  // of whatever else the launches depend on
    const at::Tensor& lr;         // 0-dim, on the CPU or on the device
    const at::Tensor& found_inf;  // one number on the device; undefined: 0
    int64_t state_bytes;
    // Launches the step with these instead.
    std::function<void(const at::Tensor& lr, const at::Tensor& found_inf)> launch;
  };

  // Replays the step, or captures and then replays it. False, and nothing is done: it has to be
  // launched as usual.
  bool run(GraphMode mode, const Step& step);

  // Drops all graphs: a step is another one from now on.
  void clear();

  // Of the graphs that are kept.
  int64_t count() const;
  int64_t scratch_bytes() const;

 private:
  struct Graphs;
  std::unique_ptr<Graphs> graphs_;  // null: not a CUDA device
};

}  // namespace torchium::optim::detail
