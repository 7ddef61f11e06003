// Natural gradient's plan of the steps of all parameter groups.
#pragma once

#include "optim/capture/joint_plan.h"
#include "optim/core/seen_tensor.h"
#include "optim/natural_gradient/kept_batch.h"
#include "optim/natural_gradient/natural_gradient_options.h"
#include "torchium/optim/natural_gradient.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

class NaturalGradientPlan : public JointPlanOf<NaturalGradientOptions, NaturalGradientParamState> {
 public:
  const char* optimizer_name() const override { return "NaturalGradient"; }

  // ---- layer calls

  // Whether the next step takes its Fisher matrix from its own batch. Decided once per step.
  bool is_refresh();
  // A call with its gradient. Weight and bias are positions in what bind() was given; -1: none, or
  // no gradient from this call. The micro-batch is any number of the backward pass.
  void record(gradients::detail::LayerCall call);
  void receive(gradients::detail::LayerCall call, const std::vector<int64_t>& gone_passes) override;
  void forget() override;
  // Backward passes with recorded calls.
  std::vector<int64_t> passes() const;

  // ---- steps

  // Whether the next step only creates state, which needs no samples.
  bool is_start();
  StateChanges take(const JointInputs& inputs) override;
  // Waits for the device.
  NaturalGradientReport report() const;

 protected:
  void make_room(SecondOrderParamState& fresh, const SecondOrderParamState& saved,
                 const at::Tensor& param, const torch::optim::OptimizerOptions& options,
                 int64_t params, const std::string& name) const override;
  void check(const std::vector<size_t>& active) override;
  void complete(size_t i, SecondOrderParamState& state) override;
  void after_bind() override;
  void after_set_options() override;
  std::unique_ptr<PlannedStep> plan(const std::vector<at::Tensor>& params, const StateList& states,
                                    at::Tensor status) override;

 private:
  struct Recorded {
    gradients::detail::LayerCall call;
    uint32_t input_version;
  };

  bool has_momentum() const;
  BatchStates batch_states() const;
  std::shared_ptr<const KeptBatch> recorded_batch(const std::vector<size_t>& active) const;
  void check_recorded(const KeptBatch& batch, const std::vector<size_t>& active) const;
  StateChanges keep();
  void set_kept(std::shared_ptr<const KeptBatch> batch);
  bool kept_is(const KeptBatch& batch) const;
  bool has_kept_params() const;

  std::map<int64_t, std::vector<Recorded>> passes_;  // by backward pass
  std::optional<bool> refresh_;                      // none: not decided
  std::shared_ptr<const KeptBatch> kept_;            // of the last refresh; null: none
  std::shared_ptr<const KeptBatch> batch_;           // of the next step; null: is_start()
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
    std::vector<std::pair<at::Tensor, at::ScalarType>> params;
    at::Tensor L;

    bool is_of(const Factorization& other) const;
  } factorization_;
  int64_t samples_ = 0;
  at::Tensor result_;  // of the last step
};

}  // namespace torchium::optim::detail
