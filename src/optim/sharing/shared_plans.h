// All plans of an optimizer whose step the ranks of a process group share. Each rank keeps
// statistics, roots and averages of its own blocks, and computes their directions. Parts of the
// gradients that the owner of a block lacks travel to it, directions to all ranks that hold
// elements of the block; these apply them. Replicated parameters and gradients
// (DistributedDataParallel) are the case in which each rank holds all.
//
// For equal gradients the result is that of one process, bit for bit, where one process computes a
// block the same way whatever is batched with it.
#pragma once

#include "distributed/communicator.h"
#include "distributed/held_error.h"
#include "distributed/part_exchange.h"
#include "distributed/step_agreement.h"
#include "distributed/update_exchange.h"
#include "optim/blocked/blocked_plans.h"
#include "optim/core/seen_tensor.h"
#include "optim/sharing/shared_blocks.h"
#include "optim/sharing/sharing_rules.h"
#include "optim/sharing/stage_stream.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

using distributed::GroupFindings;
using distributed::HeldError;
using distributed::PendingAgreement;
using distributed::StepFindings;

// Of the first parameter; the CPU without any.
c10::Device device_of(const std::vector<BlockedGroup>& groups);

struct SharingOptions {
  at::ScalarType comm_dtype = at::kFloat;  // of the updates of float32 state
  int64_t bucket_bytes = distributed::kBucketBytes;
};

class SharedPlans : public BlockedPlans {
 public:
  // `make_plan`: of parameters; `make_block_plan`: of blocks, as parameters of their own.
  SharedPlans(std::string optimizer, MakePlan make_plan, MakePlan make_block_plan,
              std::unique_ptr<SharingRules> rules, distributed::Communicator ranks,
              SharingOptions options);

  void bind(std::vector<BlockedGroup>& groups, Active active) override;
  void remember(const std::shared_ptr<const torch::optim::OptimizerOptions>& options,
                const std::vector<at::Tensor>& params) override;
  bool set_options(size_t group,
                   std::shared_ptr<const torch::optim::OptimizerOptions> options) override;
  bool prepare() override;
  void step(const LearningRates& lr, const at::Tensor& found_inf) override;
  void withdraw(c10::Device device) override;
  void update_preconditioners() override { blocks_.update_preconditioners(); }
  std::optional<std::pair<size_t, StepReport>> next_failure(bool wait) override;
  void request_reports() override;
  bool has_all_states() const override;
  int64_t host_steps(const at::Tensor& param) const override;
  int64_t graph_count() const override { return blocks_.graph_count(); }
  GroupMemory memory(size_t group, TensorBytes& counted) const override;
  bool shares() const override { return true; }
  std::vector<int64_t> owners(const at::Tensor& param) const override {
    return owners_.owners(param);
  }
  void give_owners(const at::Tensor& param, std::vector<int64_t> owners) override {
    owners_.give(param, std::move(owners));
  }
  void agree_on_states(const std::vector<BlockedGroup>& groups, bool as_shares) override;
  std::vector<ParameterState> whole_states(size_t g, const BlockedGroup& group) override;
  std::vector<SharePlaces> share_places(size_t g, const BlockedGroup& group) override;

 private:
  // A block that this rank owns, as a parameter of its own. Its gradient is that of the block, and
  // its value after a step of blocks_ the direction.
  struct OwnBlock {
    size_t block;
    at::Tensor tensor;
    at::Tensor gradient;  // memory for it; of a local block, what stands for it between steps
    const unsigned* known = nullptr;  // of this step, see KnownMagnitudes
  };
  // A part of a block whose gradient this rank has, for itself or another.
  struct Sent {
    size_t parameter;
    const distributed::Part* part;
    std::optional<ElementRows> rows;  // of the part in this rank's tensor
    // Contiguous, in the dtype of the state. Undefined: the gradient of a local block, which is
    // read where it is until a step needs a copy.
    at::Tensor memory;
    // The own block whose gradient that is; null: another.
    OwnBlock* block = nullptr;
    // The gradient of an own block, to which the values are copied; undefined: nothing to copy.
    at::Tensor target = {};
    // Of a block in a contiguous gradient, where the step can read it; empty: it cannot.
    std::vector<int64_t> strides = {};
    at::Tensor view = {};    // that block, in the gradient of this step
    at::Tensor values = {};  // of this step: `memory` or `view`
  };
  struct Parameter {
    size_t group, index;
    SeenTensor param;
    ParameterState state;  // this rank's share
    std::vector<SeenTensor> tensors;
    const SharedBlocks* shared;
    size_t kind;
    std::vector<OwnBlock> own;
    size_t stage = 0;       // of these
    bool is_local = false;  // see find_local()
    bool is_active = false;

    bool is_unchanged() const;
  };
  // A block of any rank, as a part of an exchange.
  struct Place {
    size_t parameter, block;
    size_t stage = 0;
  };
  // A part of a block that travels between two ranks.
  struct PartPlace {
    size_t parameter, block, part;
    int64_t from, to;
  };
  // Where a direction goes: a part of a block in this rank's tensor.
  struct Target {
    size_t parameter;
    const distributed::Part* part;
    std::optional<ElementRows> rows;
  };
  // The direction of a part of an own block, or the copy of it that travels.
  struct OwnDirection {
    Target target;
    at::Tensor values;
  };
  struct SentDirection {
    size_t parameter;
    at::Tensor copy, values;
  };
  // Of all parameters with one dtype of the state.
  struct Exchange {
    // Directions of blocks that all ranks hold, in the order of their stages.
    std::unique_ptr<distributed::UpdateExchange> gathered;
    std::vector<Place> gathered_places;
    // Gradients and directions of the other blocks.
    std::unique_ptr<distributed::PartExchange> gradients, updates;
    std::vector<PartPlace> gradient_places, update_places;
    // Of what travels by these, where it arrives here: of gradients the elements in those of the
    // own blocks.
    std::vector<Target> gathered_targets, update_targets;
    std::vector<at::Tensor> gradient_targets;
    std::vector<SentDirection> sent_directions;
    std::vector<OwnDirection> own_directions;
    at::Tensor directions;  // memory of the directions of these, of this rank's
  };
  struct Update {
    const Target* target;
    at::Tensor values;  // contiguous
  };

  void check(const std::vector<BlockedGroup>& groups, Active active) const;
  using Tensors = std::map<std::pair<const at::TensorImpl*, size_t>, at::Tensor>;
  void lay_out(const std::vector<BlockedGroup>& groups);
  bool gathers(const SharedBlocks& shared, size_t block) const;
  void add_parts(Exchange& exchange, size_t parameter, size_t block) const;
  void assign_stages(at::ScalarType dtype, std::vector<Place>& places) const;
  void allocate(at::ScalarType dtype, Exchange& exchange, const Tensors& before);
  void allocate_directions(at::ScalarType dtype, Exchange& exchange, const Tensors& before);
  void add_own_block(const Place& place, const at::Tensor& memory, const Tensors& before);
  void lay_out_sent();
  Target target_of(size_t parameter, const distributed::Part& part) const;
  void lay_out_updates(Exchange& exchange);
  void lay_out_own_directions(at::ScalarType dtype, Exchange& exchange);
  void find_local();
  bool has_local_blocks(const Parameter& p) const;
  bool lies_in_rows(const Parameter& p, size_t block) const;
  BlockUpdate update_of(const Parameter& p, const OwnBlock& own) const;
  OwnBlock& own_block(size_t parameter, size_t block);
  const distributed::Part& part_at(const PartPlace& place) const;
  // Directions travel in stages: those without matrices first, which take little time to compute,
  // then those with matrices. The later stages are computed together, up to the products with the
  // roots: fewer matrices at a time would leave a GPU half idle.
  static constexpr size_t kStages = 5;
  // Of a step. Local blocks: see find_local().
  enum Phase : size_t { kFirstStage, kLaterStages, kLocalBlocks, kPhases };
  size_t group_of_blocks(size_t group, size_t kind, size_t phase) const {
    return (group * rules_->kinds() + kind) * kPhases + phase;
  }
  // Of the own blocks of a parameter, in blocks_.
  size_t group_of_blocks(const Parameter& p) const {
    const Phase phase = p.is_local ? kLocalBlocks : p.stage == 0 ? kFirstStage : kLaterStages;
    return group_of_blocks(p.group, p.kind, phase);
  }
  std::vector<BlockedGroup> groups_of_blocks() const;
  void remember_for_blocks();
  std::vector<ParameterState> split_states(const std::vector<BlockedGroup>& groups, Active active,
                                           std::vector<BlockedGroup>& of_blocks);
  bool join_states(std::vector<ParameterState> before, std::vector<BlockedGroup>& of_blocks);
  void hash_setup();
  void check_states(const BlockedGroup& group, size_t g) const;
  std::vector<ParameterState> whole_frames(size_t g, const BlockedGroup& group);
  void give_gradients(const std::function<bool(const Parameter&)>& has_gradient);

  void gather_gradients();
  std::vector<int64_t> strides_in_place(const Parameter& p, const Sent& sent) const;
  bool takes_as_it_is(const Sent& sent, const at::Tensor& grad) const;
  void point_to(Sent& sent, const at::Tensor& grad) const;
  bool has_new_memory() const;
  void release_gradients();
  void examine_gradients(StepFindings& own, distributed::DeviceFindings& on_device);
  std::vector<KnownMagnitudes> known_magnitudes() const;
  at::Tensor values_of(const Sent& sent) const;
  uint64_t hash_of_step(const LearningRates& lr) const;
  PendingAgreement begin_agreement(const LearningRates& lr, const at::Tensor& found_inf);
  StepFindings settle(const PendingAgreement& agreement);
  StepFindings settle_late(const PendingAgreement& agreement);
  bool settles_late() const;
  bool are_capturable() const;
  void settle_last();
  void check_not_broken() const;
  void note_failure(const at::Tensor& failed);
  StepFindings all_kept() const;
  void finish_gradients(const StepFindings& findings);
  void exchange_gradients(const StepFindings& findings, HeldError& held);
  void step_blocks(const StepFindings& findings, const at::Tensor& skipped);
  void finish_blocks(const StepFindings& findings, const std::vector<at::Tensor>& rates);
  void step_on_device(const LearningRates& lr, const at::Tensor& found_inf);
  at::Tensor agree_on_error(const HeldError& held);
  // Copies of parameters in other memory layouts, whose blocks are no views.
  using Copies = std::map<size_t, at::Tensor>;
  std::optional<ElementRows> rows_of_part(const Parameter& p, const distributed::Part& part) const;
  void send_updates(const Exchange& exchange, const StepFindings& findings) const;
  std::vector<Update> own_updates(const Exchange& exchange, at::ScalarType dtype,
                                  const StepFindings& findings) const;
  std::vector<Update> gathered_updates(
      const Exchange& exchange, const std::vector<distributed::UpdateExchange::Update>& arrivals,
      at::ScalarType dtype, const StepFindings& findings) const;
  std::vector<Update> sent_updates(const Exchange& exchange,
                                   const std::vector<distributed::PartExchange::Arrival>& arrivals,
                                   at::ScalarType dtype, const StepFindings& findings) const;
  void apply(const std::vector<Update>& updates, const std::vector<at::Tensor>& rates,
             Copies& copies) const;
  void share_memory(distributed::OnRanks new_memory) const;
  void apply_all(const StepFindings& findings, const LearningRates& lr, const at::Tensor& skipped,
                 HeldError& held);
  void finish_parameters(const StepFindings& findings, const Copies& copies,
                         const std::vector<at::Tensor>& taken);
  void take_block_failures(bool wait);
  void report(const StepFindings& findings);
  bool is_kept(const StepFindings& findings, size_t group) const;
  size_t kept_groups(const StepFindings& findings) const;
  bool steps(const Parameter& parameter, const StepFindings& findings) const {
    return parameter.is_active && is_kept(findings, parameter.group);
  }

  std::unique_ptr<SharingRules> rules_;
  distributed::Communicator ranks_;
  SharingOptions sharing_;
  BlockOwners owners_;
  BlockedPlans blocks_;  // of the own blocks, by group_of_blocks()

  std::vector<std::shared_ptr<const torch::optim::OptimizerOptions>> options_;  // of the groups
  std::vector<c10::intrusive_ptr<BlockedPlan>> plans_of_groups_;
  std::vector<Parameter> parameters_;
  // What remember() was given since the last bind().
  std::vector<std::pair<at::Tensor, std::shared_ptr<const torch::optim::OptimizerOptions>>>
      remembered_;
  std::vector<std::string> names_;  // of these, in messages
  std::vector<Sent> sent_;
  at::Tensor magnitudes_;                         // in the gradients of a step, on a device
  std::map<at::ScalarType, Exchange> exchanges_;  // by the dtype of the state
  std::optional<StageStream> stream_;
  c10::Device device_ = at::kCPU;
  uint64_t setup_ = 0;
  at::Tensor failed_;  // failure_of_rank() of steps that are not settled, on a device
  // Of options with capturable: the host does not follow the steps.
  bool is_capturable_ = false;
  bool is_new_ = false;     // bound since the last step
  bool is_broken_ = false;  // other ranks have launched a step that this one has not
  distributed::HostMessage host_message_;
  distributed::DeviceAnswer answer_;

  std::vector<GroupFindings> failures_;  // of roots, not yet agreed on
  std::vector<int64_t> skips_in_a_row_;
  std::deque<std::pair<size_t, StepReport>> reports_;
};

}  // namespace torchium::optim::detail
