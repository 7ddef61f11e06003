// Steps of a plan as CUDA graphs: captured once, then replayed by one call of the host.
#pragma once

#include "optim/core/graph_inputs.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

namespace torchium::optim::detail {

enum class GraphMode : uint8_t {
  kAuto,    // where the scratch memory of the step is small, see StepGraphs::kShareOfState
  kAlways,  // whatever the memory
  kNever,
};

// Of an option "auto", "always" or "never".
GraphMode graph_mode(std::string_view graphs);

// A graph for each kind of step. What lies elsewhere in each step is read from memory that is
// written before it, so that a graph survives zero_grad(set_to_none=True): tables of addresses, or
// copies (GraphInputs). Scratch memory is common to all graphs and stays allocated with them.
class StepGraphs {
 public:
  explicit StepGraphs(c10::Device device);
  ~StepGraphs();
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;
  StepGraphs& operator=(StepGraphs&&) noexcept;

  // Scratch memory that kAuto allows: this share of the bytes of state, or of the device's memory.
  static constexpr double kShareOfState = 0.05, kShareOfDevice = 0.01;

  // The arguments of run() for one step.
  struct Step {
    const GraphKey& key;
    at::TensorList inputs;        // GraphInputs; their layouts need not be in the key
    const at::Tensor& found_inf;  // one number on the device; undefined: 0
    int64_t state_bytes;
    // Launches the step with these inputs. Returns tensors that outlive it.
    std::function<std::vector<at::Tensor>(at::TensorList inputs, const at::Tensor& found_inf)>
        launch;
  };

  // Replays the step, or captures and then replays it. Returns the tensors that launch() returned
  // at the capture. They lie in scratch memory and hold the values of this step until the next step
  // of any kind. None: nothing was done, and the caller must launch the step.
  std::optional<std::vector<at::Tensor>> run(GraphMode mode, const Step& step);

  // Drops all graphs. The step has changed.
  void clear();

  // Of the graphs that are kept, with the copies of inputs.
  int64_t count() const;
  int64_t scratch_bytes() const;

 private:
  struct Graphs;
  std::unique_ptr<Graphs> graphs_;  // null: not a CUDA device
};

}  // namespace torchium::optim::detail
