// All plans of an optimizer whose state is matrices of blocks: one per parameter group and device.
// Both languages step by them.
#pragma once

#include "distributed/rectangle.h"
#include "distributed/sources.h"
#include "optim/blocked/blocked_plan.h"
#include "torchium/optim/memory_report.h"
#include "torchium/optim/shampoo_report.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// A parameter group, as the optimizer keeps it.
struct BlockedGroup {
  std::shared_ptr<const torch::optim::OptimizerOptions> options;
  std::vector<at::Tensor> params;
  std::vector<std::string> names;         // in the model, of the first parameters; empty: unknown
  std::vector<ParameterState> states;     // empty: none
  std::vector<BlockUpdate> updates = {};  // empty: of the parameters themselves, in one stage
  // The tensors of which the parameters are this rank's shards; null: whole. Empty: all are.
  std::vector<std::shared_ptr<const distributed::ShardedShape>> sharded = {};

  const distributed::ShardedShape* sharded_shape(size_t i) const {
    return sharded.empty() ? nullptr : sharded[i].get();
  }
  // The parameter, or a tensor of the whole shape without memory for its elements.
  at::Tensor whole(size_t i) const;
  // A parameter that was appended to its group by hand has none.
  std::string given_name(size_t i) const { return i < names.size() ? names[i] : ""; }
  // parameter_name(), as one of group g.
  std::string name_of(size_t g, size_t i) const;
  std::string name_in_report(size_t g, size_t i) const;
};

class BlockedPlans : public torch::CustomClassHolder {
 public:
  using MakePlan = std::function<c10::intrusive_ptr<BlockedPlan>(c10::Device)>;
  BlockedPlans(std::string optimizer, MakePlan make_plan)
      : optimizer_(std::move(optimizer)), make_plan_(std::move(make_plan)) {}

  const std::string& optimizer() const { return optimizer_; }

  // The parameters that need state.
  enum class Active { kWithGradient, kWithState };
  // Checks the groups, whose options are valid, brings their states into the form that a step takes
  // (BlockedPlan::fit), and binds the plans to them. The caller keeps the states. Throws before it
  // changes anything.
  virtual void bind(std::vector<BlockedGroup>& groups, Active active);

  // Gives the plans of a group other options. False if its state has to follow: call bind().
  virtual bool set_options(size_t group,
                           std::shared_ptr<const torch::optim::OptimizerOptions> options);

  // The options that the loaded or copied state of parameters belongs to, which may be others than
  // those that bind() gets: some changes begin an average afresh.
  virtual void remember(const std::shared_ptr<const torch::optim::OptimizerOptions>& options,
                        const std::vector<at::Tensor>& params);

  // StepPlan::prepare() of all plans.
  virtual bool prepare();
  // Runs the steps planned by prepare(). `lr` returns the learning rate of a group on a device.
  using LearningRates = std::function<at::Tensor(size_t group, const BlockedPlan& plan)>;
  virtual void step(const LearningRates& lr, const at::Tensor& found_inf);
  // The steps of some groups, each with its own `found_inf` and what the ranks know of it.
  void step_groups(const std::function<bool(size_t group)>& includes, const LearningRates& lr,
                   const std::function<at::Tensor(size_t group)>& found_inf,
                   const std::function<SharedInputs(size_t group)>& shared);
  // Whether the step of a group leaves its updates to StepPlan::finish().
  bool defers(size_t group) const;
  // Calls finish() for the plans of these groups, after their steps.
  void finish_groups(const std::function<void(size_t group, BlockedPlan& plan)>& finish);
  // Ends the steps that are not finished, without updates.
  void abandon();
  // The number by which the loss of the next step was multiplied, for plans that differentiate its
  // gradients; undefined: 1.
  void set_loss_scale(at::Tensor scale) { loss_scale_ = std::move(scale); }
  // Called instead of step() by a process that cannot take the step: the others that share it raise
  // too. `device`: of the parameters.
  virtual void withdraw(c10::Device) {}
  virtual void update_preconditioners();

  // The oldest failure report not yet returned, and its group.
  virtual std::optional<std::pair<size_t, StepReport>> next_failure(bool wait);
  virtual void request_reports();

  // The states of a group from a checkpoint; empty: none.
  std::vector<ParameterState> load(size_t index, const BlockedGroup& group,
                                   const std::vector<NamedTensors>& saved) const;

  // Whether several processes share the steps. Each then keeps a part of the state.
  virtual bool shares() const { return false; }
  // The processes that own the blocks of a parameter; empty: unknown. A copy of the optimizer,
  // whose states are as those of this one, is given them before it is bound.
  virtual std::vector<int64_t> owners(const at::Tensor&) const { return {}; }
  virtual void give_owners(const at::Tensor&, std::vector<int64_t>) {}
  // Throws on all processes that share if they cannot make a checkpoint together. All must call it
  // before one of the two functions below. as_shares: before share_places().
  virtual void agree_on_states(const std::vector<BlockedGroup>&, bool /*as_shares*/) {}
  // The states of a group, as a checkpoint holds them: averages that changed options restart are
  // restarted in it, because it does not hold the options before. All processes that share must
  // call it.
  virtual std::vector<ParameterState> whole_states(size_t, const BlockedGroup& group);
  // Where a process's part of the state of a parameter lies in the whole.
  struct SharePlaces {
    ParameterState whole;       // without values: tensors on the device "meta", but for counts
    std::vector<int64_t> dims;  // in which the rectangles are
    struct Block {
      int64_t slot;    // of its first matrix; -1: none
      int64_t matrix;  // its place in its slots
      distributed::Rectangle rectangle;
    };
    std::vector<Block> blocks;  // own ones, in the order of the share
    bool is_share = false;      // or the process has the whole state
  };
  // Of a group. All processes that share must call it.
  virtual std::vector<SharePlaces> share_places(size_t, const BlockedGroup& group) {
    return std::vector<SharePlaces>(group.states.size());
  }

  // Existing state of the parameters that have some, future state of the others that require a
  // gradient.
  MemoryReport memory_report(const std::vector<BlockedGroup>& groups) const;
  ShampooReport report(const std::vector<BlockedGroup>& groups) const;

  // Whether all existing state can be used as it is. False also if the state of a parameter without
  // a gradient lacks what an option now needs.
  virtual bool has_all_states() const;

  // Steps of a parameter, as far as the host knows; -1: unknown.
  virtual int64_t host_steps(const at::Tensor& param) const;
  virtual int64_t graph_count() const;
  // StepPlan::memory() of the plans of a group.
  virtual GroupMemory memory(size_t group, TensorBytes& counted) const;

 protected:
  // A plan with the options of the group, bound to nothing.
  c10::intrusive_ptr<BlockedPlan> plan_of(const BlockedGroup& group,
                                          c10::Device device = at::kCPU) const;
  // Of parameters that all have a gradient and no state: raises what before_step() would raise,
  // before they have state.
  virtual void check_first_gradients(const std::vector<at::Tensor>&) const {}
  // Called by step() before all plans step.
  virtual void before_step() {}
  std::vector<BlockedPlan*> plans() const;
  const at::Tensor& loss_scale() const { return loss_scale_; }

 private:
  struct GroupPlan {
    size_t group;
    c10::intrusive_ptr<BlockedPlan> plan;
  };
  struct Draft;
  std::vector<Draft> draft(const std::vector<BlockedGroup>& groups, Active active) const;
  void check_first_step(const std::vector<Draft>& drafts) const;
  void adopt(Draft& draft, BlockedGroup& group);
  c10::intrusive_ptr<BlockedPlan> find_plan(size_t group, c10::Device device) const;
  ParameterState state_or_plan(const BlockedPlan& plan, const BlockedGroup& group, size_t i) const;

  std::string optimizer_;  // its name
  MakePlan make_plan_;
  bool has_all_states_ = false;
  at::Tensor loss_scale_;
  std::vector<GroupPlan> plans_;
  std::unordered_map<const at::TensorImpl*, std::shared_ptr<const StateOrigin>> origins_;
};

template <typename Plan>
c10::intrusive_ptr<BlockedPlans> make_blocked_plans(const std::string& optimizer) {
  return c10::make_intrusive<BlockedPlans>(
      optimizer, [](c10::Device device) { return c10::make_intrusive<Plan>(device); });
}

}  // namespace torchium::optim::detail
