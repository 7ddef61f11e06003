// All plans of an optimizer whose step the ranks of a process group share. Parameters and gradients
// are replicated: DistributedDataParallel. Each rank keeps statistics, roots and averages of its
// own blocks, and computes their directions; all ranks gather the directions and apply them.
//
// For equal gradients the result is that of one process, bit for bit, where one process computes a
// block the same way whatever is batched with it.
#pragma once

#include "distributed/communicator.h"
#include "distributed/update_exchange.h"
#include "optim/blocked/blocked_plans.h"
#include "optim/core/seen_tensor.h"
#include "optim/sharing/shared_blocks.h"
#include "optim/sharing/sharing_rules.h"
#include "optim/sharing/step_agreement.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

struct SharingOptions {
  at::ScalarType comm_dtype = at::kFloat;  // of the updates of float32 state
  int64_t bucket_bytes = int64_t{1} << 25;
};

class SharedPlans : public BlockedPlans {
 public:
  // `make_plan`: of parameters; `make_block_plan`: of blocks, as parameters of their own.
  SharedPlans(std::string optimizer, MakePlan make_plan, MakePlan make_block_plan,
              std::unique_ptr<SharingRules> rules, distributed::Communicator ranks,
              SharingOptions options);

  void bind(std::vector<BlockedGroup>& groups, Active active) override;
  bool set_options(size_t group,
                   std::shared_ptr<const torch::optim::OptimizerOptions> options) override;
  bool prepare() override;
  void step(const LearningRates& lr, const at::Tensor& found_inf) override;
  void withdraw() override;
  void update_preconditioners() override { blocks_.update_preconditioners(); }
  std::optional<std::pair<size_t, StepReport>> next_failure(bool wait) override;
  void request_reports() override { blocks_.request_reports(); }
  bool has_all_states() const override;
  int64_t host_steps(const at::Tensor& param) const override;
  int64_t graph_count() const override { return blocks_.graph_count(); }
  bool shares() const override { return true; }
  std::vector<ParameterState> whole_states(const BlockedGroup& group) const override;

 private:
  // A block that this rank owns, as a parameter of its own. Its gradient is that of the block, and
  // its value after a step of blocks_ the direction.
  struct OwnBlock {
    size_t block;
    at::Tensor tensor, gradient;
  };
  struct Parameter {
    size_t group, index;
    std::string name;
    SeenTensor param;
    ParameterState state;  // this rank's share
    std::vector<SeenTensor> tensors;
    const SharedBlocks* shared;
    size_t kind;
    std::vector<OwnBlock> own;
    bool is_active = false;

    bool is_unchanged() const;
  };
  // A block of any rank, as a part of an exchange.
  struct Place {
    size_t parameter, block;
  };
  struct Exchange {
    std::unique_ptr<distributed::UpdateExchange> updates;
    std::vector<Place> places;
  };

  void check(const std::vector<BlockedGroup>& groups, Active active) const;
  void lay_out(const std::vector<BlockedGroup>& groups);
  std::vector<BlockedGroup> groups_of_blocks() const;
  void hash_setup();

  void gather_gradients();
  StepFindings examine() const;
  StepFindings agreed(const LearningRates& lr, const at::Tensor& found_inf);
  void finish_gradients(const StepFindings& findings);
  // Copies of parameters in other memory layouts, whose blocks are no views.
  using Copies = std::map<size_t, at::Tensor>;
  void apply(const std::vector<distributed::UpdateExchange::Update>& updates,
             const Exchange& exchange, const StepFindings& findings,
             const std::vector<at::Tensor>& rates, Copies& copies);
  void apply_all(const StepFindings& findings, const LearningRates& lr);
  void take_block_failures();
  void report(const StepFindings& findings);
  bool is_kept(const StepFindings& findings, size_t group) const;

  std::unique_ptr<SharingRules> rules_;
  distributed::Communicator ranks_;
  SharingOptions sharing_;
  BlockOwners owners_;
  BlockedPlans blocks_;  // of the own blocks: a group of each kind for each parameter group

  std::vector<std::shared_ptr<const torch::optim::OptimizerOptions>> options_;  // of the groups
  std::vector<c10::intrusive_ptr<BlockedPlan>> plans_of_groups_;
  std::vector<Parameter> parameters_;
  std::map<at::ScalarType, Exchange> exchanges_;  // by the dtype of the state
  c10::Device device_ = at::kCPU;
  uint64_t setup_ = 0;

  std::vector<GroupFindings> failures_;  // of roots, not yet agreed on
  std::vector<int64_t> skips_in_a_row_;
  std::deque<std::pair<size_t, StepReport>> reports_;
};

}  // namespace torchium::optim::detail
