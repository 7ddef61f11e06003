// Natural gradient's plan of the steps of all parameter groups.
#pragma once

#include "gradients/capture/call_gradients.h"
#include "gradients/capture/kept_calls.h"
#include "optim/capture/curvature_passes.h"
#include "optim/capture/joint_plan.h"
#include "optim/capture/loss_curvature.h"
#include "optim/core/seen_tensor.h"
#include "optim/natural_gradient/iteration_budget.h"
#include "optim/natural_gradient/kept_batch.h"
#include "optim/natural_gradient/natural_gradient_options.h"
#include "optim/natural_gradient/natural_gradient_step.h"
#include "optim/natural_gradient/sharing/rank_batches.h"
#include "torchium/optim/natural_gradient.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

class NaturalGradientPlannedStep;

class NaturalGradientPlan : public JointPlanOf<NaturalGradientOptions, NaturalGradientParamState> {
 public:
  const char* optimizer_name() const override { return "NaturalGradient"; }

  // ---- layer calls

  // Whether the next step takes its Fisher matrix from its own batch. Decided once per step.
  bool is_refresh();
  void receive(gradients::detail::LayerCall call, const std::vector<int64_t>& gone_passes) override;
  bool joins_passes() const override { return true; }
  // Parameters of calls that backward passes have reached, if the matrix comes from curvatures
  // (-1: none): they need one.
  void note_reached(at::IntArrayRef params);
  void forget() override;
  // Backward passes with recorded calls.
  std::vector<int64_t> passes() const;
  // NaturalGradient::update_jacobian()
  void set_jacobian(std::vector<at::Tensor> rows, at::Tensor residuals);
  // Whether the next step takes the Jacobian of set_jacobian().
  bool has_jacobian() const { return given_ != nullptr; }

  // ---- steps

  // Whether the next step only creates state, which needs no samples.
  bool is_start();
  // Waits for the device.
  NaturalGradientReport report() const;
  // NaturalGradient::update_damping(): the ratio, and the factor for the damping.
  std::pair<double, double> damping_update(double loss_before, double loss_after);

 protected:
  // A micro-batch for each column.
  void add_curvature(const at::Tensor& outputs, const LossCurvature& curvature,
                     std::vector<gradients::detail::DifferentiableCall> calls) override;
  void make_room(SecondOrderParamState& fresh, const SecondOrderParamState& saved,
                 const at::Tensor& param, const torch::optim::OptimizerOptions& options,
                 int64_t params, const std::string& name) const override;
  void check(const std::vector<size_t>& active) override;
  void complete(size_t i, SecondOrderParamState& state) override;
  void after_bind() override;
  void after_set_options() override;
  std::unique_ptr<PlannedStep> plan(const std::vector<at::Tensor>& params, const StateList& states,
                                    at::Tensor status) override;
  StateChanges take_agreed(const JointInputs& inputs) override;
  std::vector<at::Tensor> kept_tensors() const override { return {factorization_.L}; }

 private:
  // The sources of the rows of the next step: of this process alone, or of all ranks together.
  struct JointBatch {
    std::shared_ptr<const SharedRows> shared;  // null: this process alone
    int64_t rows = 0;
    int64_t samples = 0;
    bool is_of_gradient = false;     // CapturedBatch
    bool has_factorization = false;  // on all ranks
    int64_t lists_hash = 0;          // JointLists
    bool knows_lists = false;        // all ranks do
  };

  RankBatch own_batch(bool refreshed) const;
  // Those of all ranks, which must all call it, for a new Gram matrix of these calls.
  std::shared_ptr<const JointLists> agree_on_lists(const CapturedBatch& batch,
                                                   const JointBatch& joint);
  JointBatch joint_batch(const RankBatch& own);
  bool is_own(const KeptBatch& batch) const;
  std::vector<at::Tensor> all_params() const;
  std::vector<at::Tensor> gradients_of_residuals(const std::vector<at::Tensor>& params,
                                                 const std::vector<at::Tensor>& rows,
                                                 const at::Tensor& residuals) const;
  bool has_momentum() const;
  BatchStates batch_states() const;
  void check_curvature_rows(const at::Tensor& outputs, const LossCurvature& curvature,
                            const std::vector<gradients::detail::DifferentiableCall>& calls) const;
  void require_curvature() const;
  void check_given() const;
  std::optional<double> predicted_reduction() const;
  std::shared_ptr<const KeptBatch> recorded_batch(const std::vector<size_t>& active) const;
  void check_recorded(const KeptBatch& batch, const std::vector<size_t>& active) const;
  CapturedBatch captured(const KeptBatch& batch) const;
  void choose_solver(NaturalGradientPlannedStep& step);
  StateChanges keep();
  void set_kept(std::shared_ptr<const KeptBatch> batch);
  bool kept_is(const KeptBatch& batch) const;
  bool has_kept_params() const;

  gradients::detail::KeptCalls passes_;
  gradients::detail::KeptCalls columns_;  // of curvatures
  CurvatureBatches curvature_batches_;
  std::set<int64_t> reached_;  // note_reached()
  // Of set_jacobian(), with the versions of its tensors; null: none.
  std::shared_ptr<const KeptBatch> given_;
  std::vector<int64_t> given_versions_;
  std::optional<bool> refresh_;             // none: not decided
  std::shared_ptr<const KeptBatch> kept_;   // of the last refresh; null: none
  std::shared_ptr<const KeptBatch> batch_;  // of the next step; null: is_start()
  // Of kept_, also after it was dropped: the parameters of all groups, in order, and the memory
  // that it shares with the state.
  std::vector<const at::TensorImpl*> kept_params_;
  std::vector<SeenTensor> kept_memory_;
  std::map<const at::TensorImpl*, std::vector<int64_t>> kept_shapes_;  // of parameters, at keep()
  // The factorisation of a batch, and everything it depends on.
  struct Factorization {
    std::shared_ptr<const KeptBatch> batch;
    std::vector<double> dampings;
    std::string solver;
    int64_t max_workspace_bytes = 0;
    int64_t nystrom_rank = 0;
    std::vector<std::pair<at::Tensor, at::ScalarType>> params;
    at::Tensor L;

    bool is_of(const Factorization& other) const;
  } factorization_;
  Factorization factorization_for(const NaturalGradientPlannedStep& step) const;
  void take_numbers(NaturalGradientPlannedStep& step);
  std::shared_ptr<const JointLists> lists_;  // of the last Gram matrix of several ranks
  // Of the last step.
  int64_t samples_ = 0;  // of all ranks
  int64_t rows_ = 0;
  std::string solver_;           // "gram", "explicit" or "cg"
  at::Tensor numbers_;           // natural_gradient_step()
  std::vector<at::Tensor> lrs_;  // with adaptive_damping
  int64_t steps_since_damping_ = 0;
  IterationBudget budget_;
};

}  // namespace torchium::optim::detail
