// What an optimizer keeps for one parameter group on one device beside the options and the state,
// which are the caller's. Python and C++ step by it.
#pragma once

#include "optim/core/parameter_state.h"
#include "optim/core/seen_tensor.h"
#include "optim/core/step_graphs.h"
#include "optim/core/step_monitor.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// Undefined: none.
const at::Tensor& gradient_of(const at::Tensor& param);

// One step of some parameters, with all that is derived from them and their state.
class PlannedStep {
 public:
  virtual ~PlannedStep() = default;
  // Takes the gradients, one per parameter, until end().
  virtual void begin(std::vector<at::Tensor> grads) { grads_ = std::move(grads); }
  // `lr`: 0-dim, float64 on the CPU or on the parameters' device. `host_steps` are the steps each
  // parameter has taken, for the root schedule alone; empty: read from the state, which must then
  // lie on the CPU. `found_inf`: one number, not 0: skip the step; undefined: 0.
  virtual void run(const at::Tensor& lr, at::IntArrayRef host_steps,
                   const at::Tensor& found_inf) = 0;
  virtual void end() { grads_.clear(); }
  // None: run() launches what no other step does. Else it launches the same as all steps with this
  // key, and nothing that a CUDA graph cannot hold.
  virtual std::optional<GraphKey> graph_key(at::IntArrayRef host_steps) const {
    return std::nullopt;
  }

 protected:
  std::vector<at::Tensor> grads_;
};

class StepPlan : public torch::CustomClassHolder {
 public:
  explicit StepPlan(c10::Device device) : device_(device), monitor_(device), graphs_(device) {}

  c10::Device device() const { return device_; }

  // Graphs of steps that are kept, and the bytes of scratch memory that these hold.
  int64_t graph_count() const { return graphs_.count(); }
  int64_t graph_bytes() const { return graphs_.scratch_bytes(); }

  // The parameters of the group on the device, in order, and their states; empty: none yet.
  // `host_steps`: steps that each has taken; -1: to be read from the state when it is needed.
  // `more_state`: one a parameter; tensors that must not change either. Empty: none.
  void bind(std::vector<at::Tensor> params, std::vector<ParameterState> states,
            std::vector<int64_t> host_steps, const std::vector<NamedTensors>& more_state = {});

  // What bind() was given.
  size_t size() const { return bound_.size(); }
  const at::Tensor& param(size_t i) const { return bound_[i].param.tensor(); }
  const ParameterState& state(size_t i) const { return bound_[i].state; }

  // Whether parameters and states are what they were then.
  bool is_unchanged() const;

  // Plans the step of the parameters that have a gradient. Changes nothing else. False where bind()
  // must come first: one of them, or its state, is not what it was, or has no state, or its
  // gradient does not fit. Plans of all groups raise ValueError for what was captured and does not
  // fit.
  virtual bool prepare();

  // The step that prepare() has planned. `lr`, `found_inf`: see PlannedStep.
  void step(const at::Tensor& lr, const at::Tensor& found_inf = {});

  // Renews the roots of all parameters with state, whatever the schedule says.
  void update_preconditioners();

  // Whether the host decides in a step which roots are due. A captured step cannot.
  virtual bool host_decides() const = 0;

  // Steps that each parameter has taken, as far as the host knows: else -1.
  const std::vector<int64_t>& host_steps() const { return host_steps_; }

  // The oldest report of a skipped step or a failed root that was not yet returned.
  std::optional<StepReport> next_failure(bool wait);
  // Has the state of the status reported that all work so far leaves, also where nothing was.
  void request_report() { monitor_.submit(); }

 protected:
  virtual std::unique_ptr<PlannedStep> plan(const std::vector<at::Tensor>& params,
                                            const StateList& states, at::Tensor status) = 0;
  virtual void renew_roots(const std::vector<at::Tensor>& params, const StateList& states,
                           at::Tensor status);

  PlannedStep* planned() const { return planned_.get(); }
  // For options that are another step, or give it other numbers.
  void forget_planned();
  void forget_graphs(GraphMode mode);

  // What prepare() does: the parameters that have a gradient (none: bind() must come first),
  // whether the step is planned for them, and planning it. Parameters are positions in what bind()
  // was given.
  std::optional<std::vector<size_t>> find_active() const;
  bool is_planned(const std::vector<size_t>& active) const {
    return planned_ != nullptr && active == active_;
  }
  void choose(std::vector<size_t> active);
  const std::vector<size_t>& active() const { return active_; }

  // Steps that parameters with state have taken. Waits for the device only after a load, a copy,
  // captured steps or a step that threw.
  std::vector<int64_t> known_steps(const std::vector<size_t>& of);
  // Takes note of the steps that are known to be done; of all after a wait.
  void take_reports(bool wait);
  // Takes back what the host has counted for a step that was skipped.
  virtual void note_skip(const std::vector<at::Tensor>& params);
  // For parameters that were moved to another device.
  void follow_to(c10::Device device);

 private:
  struct Bound {
    SeenTensor param;
    ParameterState state;
    std::vector<SeenTensor> tensors;  // of the state

    bool is_unchanged() const;
  };
  void run(const at::Tensor& lr, at::IntArrayRef host_steps, const at::Tensor& found_inf);
  void report();

  c10::Device device_;
  StepMonitor monitor_;
  std::deque<StepReport> failures_;  // that were not yet returned
  std::vector<Bound> bound_;
  std::vector<int64_t> host_steps_;  // one a bound parameter
  std::vector<size_t> active_;       // that have a gradient
  TensorVector active_params_;
  std::unique_ptr<PlannedStep> planned_;  // of those
  int64_t state_bytes_ = 0;               // of those
  GraphMode graph_mode_ = GraphMode::kNever;
  StepGraphs graphs_;  // of planned_
};

}  // namespace torchium::optim::detail
