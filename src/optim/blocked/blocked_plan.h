// The plan of one parameter group on one device whose state is blocks of matrices: which state its
// options need, and how state comes to be that.
#pragma once

#include "optim/blocked/block_storage.h"
#include "optim/core/options.h"
#include "optim/core/step_plan.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// What state was last found right for.
struct StateOrigin {
  std::shared_ptr<const torch::optim::OptimizerOptions> options;
  std::vector<int64_t> sizes;  // of the parameter
};

// A parameter and its state.
struct StateEntry {
  at::Tensor param;
  std::string name;                           // as messages call it
  ParameterState state;                       // empty: none
  bool is_active;                             // the next call needs its state
  std::shared_ptr<const StateOrigin> origin;  // null: not known
};

// What a checkpoint holds of a parameter.
struct SavedState {
  at::Tensor param;
  std::string name;
  const NamedTensors* tensors;
};

class BlockedPlan : public StepPlan {
 public:
  using StepPlan::StepPlan;
  using Options = torch::optim::OptimizerOptions;

  // Options of the optimizer's own type. The learning rate is an argument of step() instead.
  virtual void set_options(const Options& options) = 0;

  // Makes the states of parameters on this device what a step takes: checks what is there, lets it
  // follow its parameter to another dtype or device, lays matrices side by side, creates what
  // active parameters lack and drops averages that they no longer need. Changes no tensor that it
  // is given. Throws c10::ValueError for state of other options or of another shape.
  void fit(std::vector<StateEntry>& entries) const;

  // Whether state that is there has all that a step needs, and no average of old gradients.
  bool is_complete(const StateEntry& entry) const;

  // The states that a checkpoint holds of parameters on any devices, in tensors of their own.
  // Throws c10::ValueError for what does not fit.
  std::vector<ParameterState> load(const std::vector<SavedState>& saved) const;

  // The state that a parameter will have, on the device "meta".
  ParameterState planned_state(const at::Tensor& param) const;

  // Differs where state may have to follow the options.
  std::vector<std::string> needs() const;

  // What a step does with a parameter of this shape: a rule, and what there is to say about it.
  struct Rule {
    std::string name, detail;
  };
  virtual Rule rule(at::IntArrayRef shape) const { return {}; }

 protected:
  // ---- what an optimizer defines

  virtual const Options& options() const = 0;
  virtual OptionTexts options_of_state(const Options& options) const = 0;
  // Initial matrices.
  virtual BlockStorage init_storage(at::TensorList params) const = 0;
  // Adds what of the parameter's shape is always there.
  virtual void init_elementwise(const at::Tensor& param, ParameterState& state) const = 0;
  // Whether a step uses this one of kStateBuffers.
  virtual bool needs_buffer(const StateBuffer& buffer) const { return false; }
  // Whether it means something else than by the options `before`.
  virtual bool begins_afresh(const StateBuffer& buffer, const Options& before) const {
    return false;
  }
  // Throws c10::ValueError for saved state of another rule than that of the parameter.
  virtual void check_saved_rule(const at::Tensor& param, const ParameterState& saved,
                                const std::string& name) const {}

 private:
  struct FreshStates;
  FreshStates fresh_states(const std::vector<at::Tensor>& params) const;
  BlockStorage allocated_storage(const std::vector<at::Tensor>& params) const;
  void check_state(const StateEntry& entry, const ParameterState& needed) const;
  std::string changes_since(const StateEntry& entry) const;
  void fit_buffers(StateEntry& entry, bool is_new) const;
};

}  // namespace torchium::optim::detail
