// K-FAC's plan of the steps of all parameter groups.
#pragma once

#include "gradients/capture/call_gradients.h"
#include "optim/capture/curvature_passes.h"
#include "optim/capture/joint_plan.h"
#include "optim/capture/loss_curvature.h"
#include "optim/kfac/factors/factor_records.h"
#include "optim/kfac/kfac_layer.h"
#include "optim/kfac/kfac_options.h"
#include "optim/kfac/kfac_prediction.h"
#include "optim/kfac/sharing/layer_exchange.h"
#include "optim/kfac/sharing/worker_groups.h"
#include "optim/reports/message_summary.h"
#include "torchium/optim/kfac.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

struct KfacGroup;

// Throws c10::ValueError for a grad_worker_fraction that is out of range, or not 1 with ekfac.
void check_grad_workers(double fraction, bool ekfac);

// A layer that the caller declares before any call of it.
struct DeclaredLayer {
  int64_t weight;
  int64_t bias = -1;
  bool is_transposed = false;
  bool is_tied = false;
  int64_t groups = 1;        // of a convolution
  bool is_table = false;     // only looked up
  bool falls_back = false;   // has no factors
  bool is_unitwise = false;  // of a norm
  bool is_transposed_convolution = false;
};

class KfacPlan : public JointPlanOf<KFACOptions, KFACParamState> {
 public:
  const char* optimizer_name() const override { return "KFAC"; }

  // ---- ranks that share the step

  void share_with(std::shared_ptr<const distributed::Communicator> ranks) override;
  // ValueError unless it is above 0 and at most 1.
  void set_grad_worker_fraction(double fraction);
  // Once it is bound: whether ranks may have inverses that others lack, and whether this one lacks
  // any.
  bool has_parts() const;
  bool lacks_inverses() const;
  // These states, one per parameter that is bound (null: none), with the inverses of all ranks in
  // new tensors. All ranks must call it.
  using States = std::vector<std::unique_ptr<KFACParamState>>;
  States whole_states(const std::vector<const KFACParamState*>& states) const;
  States whole_states() const;  // of the bound states

  // ---- layer calls

  // Whether the factors of each parameter are due in the next step; calls of others are ignored.
  // Waits for the device only after a load.
  const std::vector<bool>& due();
  // A call with its gradient; its micro-batch is any number of the backward pass.
  void record(gradients::detail::LayerCall call);
  // What the loss of recorded calls is multiplied by; undefined: 1, or not known yet.
  void set_loss_scale(at::Tensor scale);
  void receive(gradients::detail::LayerCall call, const std::vector<int64_t>& gone_passes) override;
  void declare(const std::vector<DeclaredLayer>& layers);
  // FactorRecords::drop().
  void drop(int64_t weight, at::IntArrayRef passes = {});
  void forget() override;
  const FactorRecords& records() const { return records_; }

  // Whether a backward pass has reached a call of the parameter's layer, which counts for nothing
  // because the factors come from update_curvature().
  bool needs_curvature(const at::Tensor& param) const;

  // ---- steps

  // The rule of update_damping() of KFAC: the ratio, and what the damping is multiplied by. Waits
  // for the device.
  std::pair<double, double> damping_update(double loss_before, double loss_after);
  void update_preconditioners() override;

  // KFAC::report() of these parameters, whose states may be newer than those of bind(). `reasons`:
  // why those of fallback() have no factors; one text per parameter.
  KFACReport report(const std::vector<at::Tensor>& params, const std::vector<std::string>& names,
                    const std::vector<NamedTensors>& states,
                    const std::vector<std::string>& reasons) const;
  // Parameters whose last step was one of SGD.
  std::vector<int64_t> fallback() const;
  // Those that fall back in the next step and have not been warned about.
  const std::vector<int64_t>& new_fallback() const { return new_fallback_; }
  // The warning about them, which is given once. `names`: by reason.
  std::string fallback_warning(const std::string& optimizer, const NamesByKind& names);
  // Whether the next step has parameters, factors or samples to warn about.
  bool has_warnings() const;
  // Whether skip_layers was compared with the layers before, which one warning follows.
  bool has_compared_skips() { return std::exchange(compared_skips_, true); }
  // Warnings about factors that are kept as diagonals and about numbers of samples; each names a
  // weight once. `names`: of all parameters.
  std::vector<std::string> new_warnings(const std::string& optimizer,
                                        const std::vector<std::string>& names);

 protected:
  // KfacSharedOptions
  virtual bool writes_gradients() const { return false; }
  // What the step does with parameters without factors. `names`: a summary of them.
  virtual std::string fallback_note(const std::string& names) const;
  void make_room(SecondOrderParamState& fresh, const SecondOrderParamState& saved,
                 const at::Tensor& param, const torch::optim::OptimizerOptions& options,
                 int64_t params, const std::string& name) const override;
  void after_set_options() override;
  void check(const std::vector<size_t>& active) override;
  // As one micro-batch.
  void add_curvature(const at::Tensor& outputs, const LossCurvature& curvature,
                     std::vector<gradients::detail::DifferentiableCall> calls) override;
  bool derive(const std::vector<size_t>& active) override;
  void before_completing() override;
  void complete(size_t i, SecondOrderParamState& state) override;
  void after_bind() override;
  std::unique_ptr<PlannedStep> plan(const std::vector<at::Tensor>& params, const StateList& states,
                                    at::Tensor status) override;
  void note_skip(const std::vector<at::Tensor>& params) override;
  StateChanges take_agreed(const JointInputs& inputs) override;
  void add_to_setup(distributed::Hash& hash) const override;
  void add_layers(distributed::StepFindings& findings) override;
  void take_findings(const distributed::StepFindings& findings) override;

 private:
  // A weight that the next step preconditions, and the bias that shares its factors.
  struct Layer {
    size_t weight;
    int64_t bias;  // -1: none
    bool is_transposed;
    bool is_unitwise;
    FactorSums* sums;            // null: the factors stay
    bool has_factors;            // already
    bool has_spare_row = false;  // of A, for a bias that is not trained
    int64_t cost = 0;            // of its inverses, relative to other layers
    int64_t owner = 0;

    bool operator==(const Layer& other) const {
      return weight == other.weight && bias == other.bias && is_transposed == other.is_transposed &&
             is_unitwise == other.is_unitwise && owner == other.owner;
    }
  };

  std::optional<Layer> layer_of(size_t i, const std::vector<bool>& is_free);
  // A weight of the next step that has not been warned about.
  struct OtherSamples {
    size_t weight;
    int64_t samples, others;
  };
  // A new factor that is stored as its diagonal because of its order.
  struct Diagonal {
    size_t weight;
    std::string factor;
    int64_t order;
  };

  FactorWeight weight_of(size_t i) const;
  std::vector<OtherSamples> different_samples() const;
  std::vector<OtherSamples> disagreeing_layers() const;
  // After due().
  bool is_due(const gradients::detail::LayerCall& call) const;
  void add_to_sums(gradients::detail::LayerCall call, const CurvatureColumn* column);
  void check_curvature_rows(const gradients::detail::LayerCall& call, const at::Tensor& outputs,
                            const LossCurvature& curvature) const;
  void note_reached(const gradients::detail::LayerCall& call);
  void require_curvature(const std::vector<size_t>& active);
  // What the last step that a parameter took has done with it.
  struct Treatment {
    // "factors", "diagonal" (of one factor at least), "unit-wise", "fallback" or "none"
    std::string name;
    std::string detail;   // the orders of the factors or blocks; empty: none
    int64_t weight = -1;  // of a bias that shares the factors of this parameter
  };
  Treatment treatment(size_t i) const;
  bool has_factors(size_t i);
  void check_state(size_t i) const;
  void check_fisher_blocks(size_t i) const;
  void note_diagonals(size_t i, const KFACParamState& state, const FactorLayer& layer);
  void check_layer(const Layer& layer) const;
  void check_sharing() const;
  void choose_owners(std::vector<Layer>& layers) const;
  bool keeps_inverses(const Layer& layer) const;
  void assign_work(const Layer& of, KfacLayer& layer) const;
  std::shared_ptr<LayerExchange> make_exchange(DampingSplit split) const;
  bool is_lost(const Layer& layer) const;
  void finish_sums(const at::Tensor& loss_scale);
  void set_layers(KfacGroup& group);
  void check_captured(const KfacGroup& group) const;
  void set_sums(const Layer& of, KfacLayer& layer) const;
  void set_sums(const Layer& of, UnitwiseLayer& layer) const;
  bool has_divided_gradients() const;
  double gradient_scale(const FactorSums& sums) const;

  std::mutex records_mutex_;  // between forward and backward passes of several threads
  FactorRecords records_;
  at::Tensor loss_scale_;
  std::vector<bool> due_;      // empty: not decided
  std::vector<Layer> layers_;  // of the next step
  std::unordered_set<const at::TensorImpl*> fallback_, warned_, warned_of_samples_,
      warned_of_disagreement_;
  std::vector<int64_t> new_fallback_;
  std::vector<Diagonal> new_diagonals_;
  bool only_creates_state_ = false;  // of all declared layers
  int64_t considered_ = 0;
  // damping_update(), which may come after the step is planned anew
  int64_t steps_since_update_ = 0;
  std::optional<KfacPrediction> prediction_;  // of the last step
  bool same_counts_ = true;                   // of samples on all ranks, in this step
  std::vector<bool> checked_;                 // whether the state was checked since bind()
  // factor_updates that the host knows to be above 0.
  std::unordered_set<const at::TensorImpl*> with_factors_;
  CurvatureBatches curvature_batches_;
  // Of layers whose calls backward passes have reached since the factors come from curvatures.
  std::unordered_set<const at::TensorImpl*> reached_;
  std::string damping_split_, fisher_;  // of the options before
  bool compared_skips_ = false;
  bool is_inverse_free_ = false;
  // Weights whose inverses must be recomputed: damping_split has changed, the step that was to
  // renew them threw, or update_preconditioners() could not.
  std::unordered_set<const at::TensorImpl*> lost_inverses_;
  // Weights whose first factors a step on a GPU has made, of which the host does not know whether
  // it was skipped. If it was, the next step had no inverses of its factors.
  std::unordered_set<const at::TensorImpl*> unconfirmed_;
  // Of weights whose layers have taken a step.
  struct Owned {
    int64_t owner, cost;
  };
  std::unordered_map<const at::TensorImpl*, Owned> owners_;
  double grad_worker_fraction_ = 1.0;
  WorkerGroups groups_;
};

}  // namespace torchium::optim::detail
