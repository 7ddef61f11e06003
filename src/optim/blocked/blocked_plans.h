// All plans of an optimizer whose state is blocks of matrices, one for each parameter group and
// device, in both languages.
#pragma once

#include "optim/blocked/blocked_plan.h"
#include "torchium/optim/memory_report.h"
#include "torchium/optim/shampoo_report.h"

#include <ATen/core/Tensor.h>
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
  std::vector<std::string> names;      // in the model; empty: not known
  std::vector<ParameterState> states;  // empty ones: none
};

class BlockedPlans : public torch::CustomClassHolder {
 public:
  using MakePlan = std::function<c10::intrusive_ptr<BlockedPlan>(c10::Device)>;
  explicit BlockedPlans(MakePlan make_plan) : make_plan_(std::move(make_plan)) {}

  // Whose state has to be there.
  enum class Active { kWithGradient, kWithState };
  // Checks the groups, whose options are right, makes their states what a step takes, and binds the
  // plans to them. The caller keeps the states. Throws, and has changed nothing, for what does not
  // fit.
  void bind(std::vector<BlockedGroup>& groups, Active active);

  // Hands the plans of a group other options; false where its state has to follow: bind() first.
  bool set_options(size_t group, std::shared_ptr<const torch::optim::OptimizerOptions> options);

  // StepPlan::prepare() of all.
  bool prepare();
  // The step that prepare() has planned. `lr`: of a group on a device, see PlannedStep; `found_inf`
  // on any device.
  using LearningRates = std::function<at::Tensor(size_t group, const BlockedPlan& plan)>;
  void step(const LearningRates& lr, const at::Tensor& found_inf);
  void update_preconditioners();

  // The oldest report of a failure that was not yet returned, and its group.
  std::optional<std::pair<size_t, StepReport>> next_failure(bool wait);
  void request_reports();

  // The states of a group as a checkpoint has them; an empty one: none.
  std::vector<ParameterState> load(size_t index, const BlockedGroup& group,
                                   const std::vector<NamedTensors>& saved) const;

  // Of parameters that have state what is there, of the others that require a gradient what will
  // be.
  MemoryReport memory_report(const std::vector<BlockedGroup>& groups) const;
  ShampooReport report(const std::vector<BlockedGroup>& groups) const;

  // Whether all state that there is can be used as it is. Left out is that of parameters without a
  // gradient which lacks what an option needs by now.
  bool has_all_states() const;

  // Steps of a parameter that the host knows of; -1: not known.
  int64_t host_steps(const at::Tensor& param) const;
  int64_t graph_count() const;

 private:
  struct GroupPlan {
    size_t group;
    c10::intrusive_ptr<BlockedPlan> plan;
  };
  struct Draft;
  std::vector<Draft> draft(const std::vector<BlockedGroup>& groups, Active active) const;
  c10::intrusive_ptr<BlockedPlan> find_plan(size_t group, c10::Device device) const;
  c10::intrusive_ptr<BlockedPlan> plan_of(const BlockedGroup& group) const;
  ParameterState state_or_plan(const BlockedPlan& plan, const BlockedGroup& group, size_t i) const;

  MakePlan make_plan_;
  bool has_all_states_ = false;
  std::vector<GroupPlan> plans_;
  std::unordered_map<const at::TensorImpl*, std::shared_ptr<const StateOrigin>> origins_;
};

template <typename Plan>
c10::intrusive_ptr<BlockedPlans> make_blocked_plans() {
  return c10::make_intrusive<BlockedPlans>(
      [](c10::Device device) { return c10::make_intrusive<Plan>(device); });
}

}  // namespace torchium::optim::detail
