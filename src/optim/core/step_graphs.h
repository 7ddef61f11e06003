// Steps of a plan as CUDA graphs: captured once, then replayed by one call of the host.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace torchium::optim::detail {

enum class GraphMode : uint8_t {
  kAuto,    // where the scratch memory of the step is small, see StepGraphs::kShareOfState
  kAlways,  // whatever the memory
  kNever,
};

// Everything that the launches of a step depend on except the options, the state tensors and the
// gradients' addresses.
using GraphKey = std::vector<uint8_t>;

// A graph for each kind of step. Kernels find the addresses of the gradients in memory that is
// written before every step, so that a graph survives zero_grad(set_to_none=True). Scratch memory
// is common to all graphs and stays allocated with them.
class StepGraphs {
 public:
  explicit StepGraphs(c10::Device device);
  ~StepGraphs();
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;

  // Scratch memory that kAuto allows: this share of the bytes of state, or of the device's memory.
  static constexpr double kShareOfState = 0.05, kShareOfDevice = 0.01;

  // The arguments of run() for one step.
  struct Step {
    const GraphKey& key;
    const at::Tensor& lr;         // 0-dim, on the CPU or on the device
    const at::Tensor& found_inf;  // one number on the device; undefined: 0
    int64_t state_bytes;
    // Launches the step with these instead.
    std::function<void(const at::Tensor& lr, const at::Tensor& found_inf)> launch;
  };

  // Replays the step, or captures and then replays it. False, and nothing is done: it has to be
  // launched as usual.
  bool run(GraphMode mode, const Step& step);

  // Drops all graphs. The step has changed.
  void clear();

  // Of the graphs that are kept.
  int64_t count() const;
  int64_t scratch_bytes() const;

 private:
  struct Graphs;
  std::unique_ptr<Graphs> graphs_;  // null: not a CUDA device
};

}  // namespace torchium::optim::detail
