// K-FAC (Martens and Grosse 2015, arXiv 1503.05671; convolutions: Grosse and Martens 2016, arXiv
// 1602.01407; several positions: Eschenhagen et al. 2023, arXiv 2311.00636) with the empirical
// Fisher.
#pragma once

#include "distributed/held_error.h"
#include "optim/core/step_prologue.h"
#include "optim/kfac/kfac_prediction.h"
#include "optim/kfac/kfac_subset.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// Steps of the parameters of all groups with the same state and layers: by CUDA kernels for those
// that these support, by PyTorch operators for all others. Parameters without a layer take steps of
// SGD with momentum.
class KfacStep : public PrologueStep {
 public:
  // At least one parameter, not transposed: this makes views of transposed weights. Keeps the
  // tensors, which the caller owns. status: see step_status.h.
  KfacStep(KfacGroup group, at::Tensor status);
  KfacStep(const KfacStep&) = delete;
  KfacStep& operator=(const KfacStep&) = delete;

  // Before a step the caller sets `lr` of the parameters and the fields of layers for one step.
  KfacGroup& group() { return group_; }
  // The inverses of all factors as they are.
  void renew_inverses();
  // Releases the sums.
  void forget_sums();

  // The prediction of the last step, once; with keeps_prediction.
  std::optional<KfacPrediction> take_prediction() { return std::exchange(prediction_, {}); }

  void begin(std::vector<at::Tensor> grads) override;
  // `lr` and `host_steps` are not used.
  void run(const at::Tensor& lr, at::IntArrayRef host_steps, const at::Tensor& found_inf) override;
  // None for steps with new factors or inverses, that ranks share, or that take other operators
  // than kernels.
  std::optional<GraphKey> graph_key(at::IntArrayRef host_steps) const override;
  // The learning rates. Neighbours with the same tensor are listed once.
  std::vector<at::Tensor> inputs() override;
  void set_inputs(at::TensorList inputs) override;
  std::vector<at::Tensor> kept_tensors() const override;

 private:
  void make_subsets();
  bool renews_factors_or_inverses() const;
  // Whether the learning rate of a parameter is another tensor than that of its predecessor.
  bool has_other_lr(size_t k) const;
  void examine_sums();
  // Work of this rank alone, whose error is held while there are collectives to take part in.
  using HeldError = distributed::HeldError;
  void update_inverses(bool KfacLayer::*wanted, const FoundInfGuard& guard, HeldError& held);
  std::vector<at::Tensor> direction(size_t layer, const HeldError& held) const;
  void send_directions(const HeldError& held) const;
  void record_failures();
  StepScalar precondition(const KfacRun& run, HeldError& held);
  // False: the host knows that all ranks skip the step. Throws an error that is held, on a CPU on
  // all ranks. On other devices it stays held while ranks share the step.
  bool all_go_on(bool is_kept, const HeldError& held) const;
  // At least one per group.
  std::vector<at::Tensor> copy_learning_rates() const;

  KfacGroup group_;
  at::Tensor status_;
  std::vector<std::unique_ptr<KfacSubset>> subsets_;
  std::vector<size_t> subset_of_;  // of each layer
  bool all_by_kernels_ = false;

  std::optional<KfacPrediction> prediction_;
};

}  // namespace torchium::optim::detail
