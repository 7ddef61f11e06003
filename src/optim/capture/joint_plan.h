// The plan of an optimizer that captures layer calls: one for the parameters of all groups.
#pragma once

#include "distributed/communicator.h"
#include "distributed/step_agreement.h"
#include "gradients/capture/operator_capture.h"
#include "optim/capture/adaptive_damping.h"
#include "optim/capture/curvature_passes.h"
#include "optim/core/device_learning_rate.h"
#include "optim/core/options.h"
#include "optim/core/step_plan.h"
#include "torchium/optim/capturing_optimizer.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// Changes to the caller's state. Parameters are positions in what bind() was given.
using StateChanges = std::vector<StateChange>;

struct JointInputs {
  std::vector<at::Tensor> lrs;  // one per group: 0-dim, float64 on the CPU or on the device
  at::Tensor found_inf;         // see PlannedStep
  // Factor of the loss that is still in the recorded calls; undefined: 1.
  at::Tensor loss_scale;
};

class JointPlan : public StepPlan {
 public:
  JointPlan() : StepPlan(at::kCPU) {}

  // The ranks that share the step: parameters and gradients are the same on all of them, recorded
  // calls are those of each rank's samples. Null, or one rank: none. Called before anything else.
  virtual void share_with(std::shared_ptr<const distributed::Communicator> ranks) {
    ranks_ = ranks != nullptr && ranks->size() > 1 ? std::move(ranks) : nullptr;
  }
  bool is_shared() const { return ranks_ != nullptr; }
  // Called instead of take() after an error, so that the other ranks raise instead of waiting.
  void withdraw();
  // All ranks that share the step make this call, such as "update_damping()", or all raise. check()
  // throws for what this rank cannot accept.
  void agree_to(const std::string& call, const std::function<void()>& check);

  // The options of each group; those that must be the same in all groups are. lr does not count.
  virtual void set_options(const std::vector<const torch::optim::OptimizerOptions*>& groups) = 0;

  // The parameters of all groups and their states (empty: none yet), groups, and names in messages.
  // The plan follows them to another device. Step counts that the host knows are kept.
  void bind(std::vector<at::Tensor> params, const std::vector<NamedTensors>& states,
            std::vector<int64_t> groups, std::vector<std::string> names);
  // Whether bind() was given this state for the parameter.
  bool is_bound_to(size_t i, const SecondOrderParamState* state) const;

  int64_t group(size_t i) const { return groups_[i]; }
  // -1: not bound, or undefined.
  int64_t position(const at::Tensor& param) const;

  // Parameters whose gradients do not come from recorded calls alone; replaces those given before.
  void exclude(const std::vector<int64_t>& params);
  // Records a captured call, with weight and bias as positions in what bind() was given, and drops
  // what comes from `gone_passes` (OperatorCapture::Receiver).
  virtual void receive(gradients::detail::LayerCall call,
                       const std::vector<int64_t>& gone_passes) = 0;
  // Whether backward passes over one graph bring parts of the same samples' gradients
  // (LayerCall::first_pass).
  virtual bool joins_passes() const { return false; }
  // Of the options.
  virtual const std::string& fisher() const = 0;
  // Whether fisher is "mc" or "ggn": what is recorded comes from record_curvature() alone.
  bool takes_curvature() const { return !fisher().empty() && fisher() != "empirical"; }
  // Records the gradients of `outputs` times each column of the curvature of the loss by the
  // outputs of these calls. Keeps the graph. If it throws, all that was recorded is dropped.
  void record_curvature(const at::Tensor& outputs, const LossCurvature& curvature,
                        const std::vector<gradients::detail::DifferentiableCall>& calls);
  // Drops what was recorded.
  virtual void forget() = 0;

  // The number of the next step of each group: 1 + the steps that one of its parameters has taken
  // at most. Waits for the device if the host does not know them, after a load or a copy.
  std::vector<int64_t> next_steps(size_t groups);

  // False also if state is missing (missing_state()).
  bool prepare() override;
  // State that the next step has to create, or to convert to another device or dtype. After bind().
  // ValueError for state that does not fit its parameter.
  StateChanges missing_state();
  // The step that prepare() has planned. Returns the state whose tensors it replaces. Ranks that
  // share the step agree on it first: all take it, or all raise.
  StateChanges take(const JointInputs& inputs);

  // State of a parameter with the values of `saved` from a checkpoint. `params`: how many the
  // optimizer has. ValueError for what does not fit (loaded_state() of state_checks.h).
  NamedTensors load(const at::Tensor& param, const NamedTensors& saved,
                    const torch::optim::OptimizerOptions& options, int64_t params,
                    const std::string& name) const;

  // The learning rate of a group for take(); and those of all groups, for replays of steps that a
  // graph has captured.
  at::Tensor learning_rate(size_t group, double lr);
  void sync_learning_rates(const std::vector<double>& lrs);
  // Inverts what the steps precondition with; see KFAC::update_preconditioners().
  virtual void update_preconditioners() {}

  // Memory of these parameters, states, groups and names (bind()), of `groups` groups in all, and
  // of this plan.
  MemoryReport memory_report(const std::vector<at::Tensor>& params,
                             const std::vector<NamedTensors>& states,
                             const std::vector<int64_t>& groups_of_params,
                             const std::vector<std::string>& names, size_t groups) const;

 protected:
  // ---- what an optimizer defines

  virtual std::unique_ptr<SecondOrderParamState> make_state() const = 0;
  // Gives `fresh` what `saved` has besides the step count and the momentum buffer; its values do
  // not count yet.
  virtual void make_room(SecondOrderParamState& fresh, const SecondOrderParamState& saved,
                         const at::Tensor& param, const torch::optim::OptimizerOptions& options,
                         int64_t params, const std::string& name) const = 0;
  // record_curvature(), by one thread at a time.
  virtual void add_curvature(const at::Tensor& outputs, const LossCurvature& curvature,
                             std::vector<gradients::detail::DifferentiableCall> calls) = 0;
  // Throws c10::ValueError for recorded calls or state that does not fit.
  virtual void check(const std::vector<size_t>& active) = 0;
  // Derives what the step of these parameters depends on; true: it has changed.
  virtual bool derive(const std::vector<size_t>& active) { return false; }
  // Adds the state of an active parameter that a step needs. before_completing() comes once before.
  virtual void before_completing() {}
  virtual void complete(size_t i, SecondOrderParamState& state) = 0;
  // Called after bind().
  virtual void after_bind() {}
  virtual StateChanges take_agreed(const JointInputs& inputs) = 0;
  // What must be the same on all ranks that share the step, besides parameters and learning rates.
  virtual void add_to_setup(distributed::Hash& hash) const = 0;
  // `layers` and `renews` of what the ranks agree on, and what they have agreed on.
  virtual void add_layers(distributed::StepFindings& findings) {}
  virtual void take_findings(const distributed::StepFindings& findings) {}
  // The next step raises on all ranks: this one has left a step by an error, and others took it.
  void leave_step() { has_left_step_ = true; }
  // Reports count from an agreement on, so that all ranks have the same step counts.
  bool settles_reports() const override { return is_shared() && !device().is_cpu(); }

  // ---- what it may use; parameters are positions in what bind() was given

  const std::string& name(size_t i) const { return names_[i]; }
  const SecondOrderParamState& own_state(size_t i) const { return *states_[i]; }
  const distributed::Communicator& ranks() const { return *ranks_; }  // where the step is shared
  bool is_excluded(size_t i) const { return excluded_.count(param(i).unsafeGetTensorImpl()) != 0; }
  // Steps that each parameter has taken; 0 without state. Waits for the device if the host does not
  // know.
  std::vector<int64_t> steps_taken();
  // Whether no step was taken yet and all gradients are zero. torch.distributed.checkpoint takes
  // such a step to create the state that it loads into. Waits for the device.
  bool only_creates_state();
  std::vector<at::Tensor> learning_rates(const JointInputs& inputs) const;  // of active parameters
  // The means over the ranks that share the step, which must all call it.
  DampingLosses joint_losses(const DampingLosses& own) const;

 private:
  // While a CUDA graph of the caller captures.
  void refuse_capture(c10::Device device, const char* why) const;
  distributed::StepFindings own_findings(const JointInputs& inputs);
  // Returns the inputs of all ranks.
  JointInputs agree(const JointInputs& inputs);
  bool combines_found_inf(const at::Tensor& found_inf) const;
  at::Tensor joint_found_inf(const at::Tensor& own) const;
  StateChanges changes_for(const std::vector<size_t>& active);
  void check_all(const std::vector<size_t>& active);

  std::shared_ptr<const distributed::Communicator> ranks_;
  bool has_left_step_ = false;
  std::vector<std::unique_ptr<SecondOrderParamState>> states_;
  std::vector<int64_t> groups_;
  std::vector<std::string> names_;
  std::unordered_map<const at::TensorImpl*, int64_t> positions_;
  std::unordered_set<const at::TensorImpl*> excluded_;
  std::mutex curvature_mutex_;                      // threads may share a model
  std::vector<DeviceLearningRate> learning_rates_;  // of the groups
  std::vector<at::Tensor> fresh_steps_;  // `step` of no steps, for which bind() is to come
};

// A plan with options and state of these types.
template <typename Options, typename State>
class JointPlanOf : public JointPlan {
 public:
  void set_options(const std::vector<const torch::optim::OptimizerOptions*>& groups) override {
    std::vector<Options> options;
    for (const auto* group : groups) {
      options.push_back(own_options(*group));
    }
    const auto differ = [&](OptionTraits others) {
      return !std::ranges::equal(options, options_, [&](const Options& a, const Options& b) {
        return equal_but_lr(a, b, others);
      });
    };
    if (differ(kPlain)) {
      const bool needs_plan = differ(kScheduled);
      options_ = std::move(options);
      after_set_options();
      if (needs_plan) {
        forget_planned();
      }
    }
  }
  bool host_decides() const override { return options_.empty() || !options_.front().capturable(); }
  const std::string& fisher() const override {
    static const std::string unknown;
    return options_.empty() ? unknown : options_.front().fisher();
  }

 protected:
  std::unique_ptr<SecondOrderParamState> make_state() const override {
    return std::make_unique<State>();
  }
  // Of a group. ValueError for those of another optimizer.
  virtual Options own_options(const torch::optim::OptimizerOptions& group) const {
    return options_as<Options>(group, optimizer_name());
  }
  virtual void after_set_options() {}
  void add_to_setup(distributed::Hash& hash) const override {
    for (const Options& group : options_) {
      for_each_option(group, [&](const auto& option) {
        hash.add(std::string_view(option.name) == "lr" ? "" : text_of(option.value));
      });
    }
  }

  const std::vector<Options>& options() const { return options_; }
  const Options& options(size_t i) const { return options_.at(static_cast<size_t>(group(i))); }
  const State& state_of(size_t i) const { return static_cast<const State&>(own_state(i)); }

 private:
  std::vector<Options> options_;
};

// Adds the changes from `before` to `after`.
void append_changes(int64_t param, const SecondOrderParamState& before,
                    const SecondOrderParamState& after, StateChanges& changes);

}  // namespace torchium::optim::detail
