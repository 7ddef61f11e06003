// What both languages keep for one parameter group on one device, besides options and state, which
// are the caller's.
#pragma once

#include "optim/core/parameter_state.h"
#include "optim/core/seen_tensor.h"
#include "optim/core/state_memory.h"
#include "optim/core/step_graphs.h"
#include "optim/core/step_monitor.h"
#include "support/workspace_owners.h"
#include "torchium/optim/memory_report.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// The gradient of the parameter, undefined if it has none.
const at::Tensor& gradient_of(const at::Tensor& param);

// The largest magnitudes in gradients that were examined before the step, on a GPU as the bits of
// floats; null: the step examines the gradient. Empty: it does so with all.
using KnownMagnitudes = std::vector<const unsigned*>;

// What ranks that share a step know of it.
struct SharedInputs {
  KnownMagnitudes known;
  // Called when the device has been given all work for the updates of a stage, in the order of the
  // stages; null, or a step that cannot be cut into stages: not called.
  std::function<void()> end_stage;
};

// The step of some parameters, with everything derived from them and their state.
class PlannedStep {
 public:
  virtual ~PlannedStep() = default;
  // Takes the gradients, one per parameter, until end().
  virtual void begin(std::vector<at::Tensor> grads) { grads_ = std::move(grads); }
  // Before begin(): of each parameter, see KnownMagnitudes.
  virtual void set_known(KnownMagnitudes known) {}
  // Of this step, see SharedInputs.
  virtual void set_end_of_stages(std::function<void()> end_stage) {}
  // `lr`: 0-dim, float64 on the CPU or on the parameters' device. `host_steps` are the steps each
  // parameter has taken, for the root schedule alone; empty: read from the state, which must then
  // lie on the CPU. `found_inf`: one number, not 0: skip the step; undefined: 0.
  virtual void run(const at::Tensor& lr, at::IntArrayRef host_steps,
                   const at::Tensor& found_inf) = 0;
  virtual void end() { grads_.clear(); }
  // Whether run() leaves the updates of the parameters to finish(), which comes before end().
  virtual bool defers() const { return false; }
  // p <- (1 - lr wd) p - lr d. `lr`: as of run().
  virtual void finish(const at::Tensor& lr, double decoupled_weight_decay) {}
  // Steps with equal keys launch the same work, all of which a CUDA graph can capture. None: the
  // step cannot be captured.
  virtual std::optional<GraphKey> graph_key(at::IntArrayRef host_steps) const {
    return std::nullopt;
  }
  // The tensors of which a graph of run() reads copies (GraphInputs), besides `lr` and `found_inf`;
  // and the copies that run() is to read instead.
  virtual std::vector<at::Tensor> inputs() { return {}; }
  virtual void set_inputs(at::TensorList inputs) {}
  // The tensors that run() leaves for later calls; and those that a replayed graph has left.
  virtual std::vector<at::Tensor> results() const { return {}; }
  virtual void set_results(at::TensorList results) {}
  // Tensors that stay after end() besides those of the caller.
  virtual std::vector<at::Tensor> kept_tensors() const { return {}; }

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
  // The workspace and the graphs, without tensors that are counted already.
  GroupMemory memory(TensorBytes& counted) const;

  // The parameters of the group on the device, in order, and their states; empty: none yet.
  // `host_steps`: steps that each has taken; -1: read from the state when needed. `more_state`:
  // further tensors whose identity is checked, one list per parameter; empty: none.
  void bind(std::vector<at::Tensor> params, std::vector<ParameterState> states,
            std::vector<int64_t> host_steps, const std::vector<NamedTensors>& more_state = {});

  // The arguments of bind().
  size_t size() const { return bound_.size(); }
  const at::Tensor& param(size_t i) const { return bound_[i].param.tensor(); }
  const ParameterState& state(size_t i) const { return bound_[i].state; }

  // Whether parameters and states are unchanged since bind().
  bool is_unchanged() const;

  // Plans the step of the parameters that have a gradient; changes nothing else. False if bind()
  // must come first: a parameter or its state has changed, it has no state, or its gradient does
  // not fit. Plans of all groups raise ValueError for captured layer calls that do not fit.
  virtual bool prepare();

  // Runs the step planned by prepare(). `lr`, `found_inf`: see PlannedStep; `found_inf` on any
  // device. `shared`: of the parameters of bind().
  void step(const at::Tensor& lr, const at::Tensor& found_inf = {},
            const SharedInputs& shared = {});

  // Whether the planned step leaves the updates of its parameters to finish().
  bool defers() const { return planned_ != nullptr && planned_->defers(); }
  // Ends a step that defers: PlannedStep::finish(); or without updates.
  void finish(const at::Tensor& lr, double decoupled_weight_decay);
  void abandon();

  // Whether the host decides which roots are due, so that the caller cannot capture the step.
  virtual bool host_decides() const = 0;

  // Steps that each parameter has taken; -1: unknown to the host.
  const std::vector<int64_t>& host_steps() const { return host_steps_; }

  // The oldest report of a skipped step or a failed root not yet returned.
  std::optional<StepReport> next_failure(bool wait);
  // Queues a report of the status after all work so far.
  void request_report() { monitor_.submit(); }

  // Its name in reports.
  virtual const char* optimizer_name() const { return "optimizer"; }

 protected:
  virtual std::unique_ptr<PlannedStep> plan(const std::vector<at::Tensor>& params,
                                            const StateList& states, at::Tensor status) = 0;

  PlannedStep* planned() const { return planned_.get(); }
  // Tensors that a step leaves for later ones besides the state.
  virtual std::vector<at::Tensor> kept_tensors() const {
    return planned_ == nullptr ? std::vector<at::Tensor>() : planned_->kept_tensors();
  }
  // For options that change the step, or numbers in it.
  void forget_planned();
  void forget_graphs(GraphMode mode);  // and uses this mode from now on

  // The parts of prepare(): the parameters with a gradient (none: bind() must come first), whether
  // the step is planned for them, and planning it. Parameters are positions in the list of bind().
  std::optional<std::vector<size_t>> find_active() const;
  bool is_planned(const std::vector<size_t>& active) const {
    return planned_ != nullptr && active == active_;
  }
  void choose(std::vector<size_t> active);
  const std::vector<size_t>& active() const { return active_; }

  // Steps that parameters with state have taken. Waits for the device only if the host does not
  // know them: after a load, a copy, captured steps or a step that threw.
  std::vector<int64_t> known_steps(const std::vector<size_t>& of);
  // Reads the reports that have arrived, or all of them after a wait. With settles_reports() only
  // after a wait.
  void take_reports(bool wait);
  // Corrects the host's step counts for a skipped step.
  virtual void note_skip(const std::vector<at::Tensor>& params);
  // Whether reports count only where settle_reports() is called: they arrive at different times on
  // ranks that share the step.
  virtual bool settles_reports() const { return false; }
  void settle_reports();
  StepMonitor& monitor() { return monitor_; }
  // The roots of which the next report counts failures are those of the active parameters.
  void note_roots() { monitor_.set_root_params(active_params_); }
  // Submits the status of a call, unless that is captured.
  void report();
  // Moves the plan to another device, with its parameters.
  void follow_to(c10::Device device);

 private:
  struct Bound {
    SeenTensor param;
    ParameterState state;
    std::vector<SeenTensor> tensors;  // of the state

    bool is_unchanged() const;
  };
  void run(const at::Tensor& lr, at::IntArrayRef host_steps, const at::Tensor& found_inf,
           const SharedInputs& shared);
  void end_step();
  // Replays run() as a graph. False: there is no graph.
  bool replay(const GraphKey& key, const at::Tensor& lr, at::IntArrayRef host_steps,
              const at::Tensor& found_inf);
  // The memory that the plan holds; empty before the first step.
  std::vector<WorkspaceUse> workspaces() const;

  c10::Device device_;
  StepMonitor monitor_;
  std::deque<StepReport> failures_;  // not yet returned
  std::vector<TensorVector> skips_;  // parameters of skipped steps that are not settled
  std::vector<Bound> bound_;
  std::vector<int64_t> host_steps_;  // one per bound parameter
  std::vector<size_t> active_;       // those with a gradient
  TensorVector active_params_;
  std::unique_ptr<PlannedStep> planned_;  // of the active parameters
  bool is_unfinished_ = false;            // run(), but not yet end()
  bool is_captured_ = false;              // planned_ is part of a caller's graph
  // Earlier ones: replays use their memory.
  std::vector<std::unique_ptr<PlannedStep>> captured_;
  int64_t state_bytes_ = 0;  // of the active parameters
  GraphMode graph_mode_ = GraphMode::kNever;
  StepGraphs graphs_;  // of planned_
  const torchium::detail::WorkspaceOwner owner_{[this] { return workspaces(); }};
};

}  // namespace torchium::optim::detail
