// The plan for one parameter group on one device whose state is matrices of blocks. It knows which
// state the options need, and creates, converts and checks it.
#pragma once

#include "optim/blocked/block_storage.h"
#include "optim/blocked/block_update.h"
#include "optim/core/options.h"
#include "optim/core/step_plan.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// The options and shape that a state was last checked against.
struct StateOrigin {
  std::shared_ptr<const torch::optim::OptimizerOptions> options;
  std::vector<int64_t> sizes;  // of the parameter
};

// A parameter and its state.
struct StateEntry {
  at::Tensor param;
  std::string name;                           // in messages
  ParameterState state;                       // empty: none
  bool is_active;                             // the next call needs its state
  std::shared_ptr<const StateOrigin> origin;  // null: unknown
};

// The state of a parameter in a checkpoint.
struct SavedState {
  at::Tensor param;
  std::string name;
  const NamedTensors* tensors;
};

class BlockedPlan : public StepPlan {
 public:
  using StepPlan::StepPlan;
  using Options = torch::optim::OptimizerOptions;

  // Takes options of the optimizer's own type; the learning rate is an argument of step() instead.
  // False where the state has to follow them: fit() and bind() come before the next step.
  bool set_options(const Options& options);

  // Of the parameters of the next bind().
  void set_updates(std::vector<BlockUpdate> updates) { updates_ = std::move(updates); }

  // Brings the states of parameters on this device into the form that a step takes: checks existing
  // state, converts it to the parameter's dtype and device, lays matrices side by side, creates
  // what active parameters lack and drops averages that they no longer need. Changes none of the
  // given tensors. Throws c10::ValueError for state of other options or of another shape.
  void fit(std::vector<StateEntry>& entries) const;

  // Replaces averages of another quantity than that of the options, as fit() does.
  void restart_averages(StateEntry& entry) const;

  // Whether the state has all that a step needs, and no average that the options no longer use.
  bool is_complete(const StateEntry& entry) const;

  // The states that a checkpoint holds for parameters on any devices, in new tensors. Throws
  // c10::ValueError for state that does not fit.
  std::vector<ParameterState> load(const std::vector<SavedState>& saved) const;

  // The state that a parameter will have, on the device "meta".
  ParameterState planned_state(const at::Tensor& param) const;

  // Renews the roots of all parameters with state, whatever the schedule says.
  void update_preconditioners();

  // What a step does with a parameter of this shape, for reports.
  struct Rule {
    std::string name, detail;
  };
  virtual Rule rule(at::IntArrayRef shape) const { return {}; }

 protected:
  // Of the active parameters.
  std::vector<BlockUpdate> updates() const;

  // ---- what an optimizer defines

  virtual const Options& options() const = 0;
  virtual void adopt(const Options& options) = 0;
  // The gradient limits of a planned step depend on it (gradient_limits()).
  virtual double l2_penalty() const = 0;
  virtual OptionTexts options_of_state(const Options& options) const = 0;
  // Initial matrices.
  virtual BlockStorage init_storage(at::TensorList params) const = 0;
  // Adds the tensors of the parameter's shape that its state always has.
  virtual void init_elementwise(const at::Tensor& param, ParameterState& state) const = 0;
  // Whether a step uses this one of kStateBuffers.
  virtual bool needs_buffer(const StateBuffer& buffer) const { return false; }
  // Whether the buffer holds another quantity than with the options `before`.
  virtual bool restarts(const StateBuffer& buffer, const Options& before) const { return false; }
  // Throws c10::ValueError for saved state of another rule than that of the parameter.
  virtual void check_saved_rule(const at::Tensor& param, const ParameterState& saved,
                                const std::string& name) const {}
  virtual void renew_roots(const std::vector<at::Tensor>& params, const StateList& states,
                           at::Tensor status);

 private:
  // Differs from before if the state may have to follow the options.
  std::vector<std::string> needs() const;
  struct FreshStates;
  FreshStates fresh_states(const std::vector<at::Tensor>& params) const;
  BlockStorage allocated_storage(const std::vector<at::Tensor>& params) const;
  void check_state(const StateEntry& entry, const ParameterState& needed) const;
  std::string changes_since(const StateEntry& entry) const;
  void fit_buffers(StateEntry& entry, bool is_new) const;
  bool has_stale_average(const StateEntry& entry, const StateBuffer& buffer) const;

  std::vector<BlockUpdate> updates_;
};

// A plan with options of this type; `graphs` among them is whether it captures its
// steps.
template <typename OwnOptions>
class BlockedPlanOf : public BlockedPlan {
 public:
  using BlockedPlan::BlockedPlan;

 protected:
  const Options& options() const override { return options_; }
  void adopt(const Options& options) override {
    options_ = static_cast<const OwnOptions&>(options);
    forget_graphs(graph_mode(options_.graphs()));
  }
  OptionTexts options_of_state(const Options& options) const override {
    return detail::options_of_state(static_cast<const OwnOptions&>(options));
  }

  OwnOptions options_;
};

}  // namespace torchium::optim::detail
