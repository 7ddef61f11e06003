// K-FAC in front of another optimizer.
#pragma once

#include "torchium/export.h"
#include "torchium/optim/kfac.h"
#include "torchium/optim/options.h"

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace torchium::optim {

/// Options of KFACPreconditioner; names and defaults are those of Python's
/// `torchium.KFACPreconditioner`, and the first six names also those of kfac-pytorch.
/// batch_averaged, kl_clip, damping_split, ekfac, solver and fisher must be the same in all
/// groups; for the others, the group of the weight decides for a layer.
struct TORCHIUM_API KFACPreconditionerOptions : public OptionsOf<KFACPreconditionerOptions>,
                                                public SharedOptions {
  KFACPreconditionerOptions(double lr = 0.1);
  /// Learning rate of the other optimizer, >= 0. Only the KL clip depends on it.
  TORCH_ARG(double, lr) = 0.1;
  /// KFACOptions::TCov.
  TORCH_ARG(int64_t, factor_update_steps) = 5;
  /// KFACOptions::TInv.
  TORCH_ARG(int64_t, inv_update_steps) = 10;
  /// As in KFACOptions.
  TORCH_ARG(double, damping) = 0.01;
  /// KFACOptions::stat_decay.
  TORCH_ARG(double, factor_decay) = 0.95;
  /// As in KFACOptions, like all options below.
  TORCH_ARG(std::optional<double>, kl_clip) = 1e-3;
  TORCH_ARG(bool, batch_averaged) = true;
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(std::string, damping_split) = "pi";
  TORCH_ARG(bool, ekfac) = false;
  TORCH_ARG(std::string, solver) = "auto";
  TORCH_ARG(KFACOptions::structures_t, structures) = std::make_tuple("dense", "dense");
  TORCH_ARG(int64_t, block_size) = 32;
  TORCH_ARG(double, alpha1) = 0.5;
  TORCH_ARG(std::string, fisher) = "empirical";
  TORCH_ARG(std::string, weight_sharing) = "expand";
  TORCH_ARG(int64_t, max_factor_size) = 5000;
  TORCH_ARG(std::optional<std::string>, factor_dtype) = std::nullopt;
  /// The first six options as functions of the step; their values above follow.
  TORCH_ARG(Schedules, schedules) = {};

 public:
  /// As in KFACOptions.
  KFACPreconditionerOptions& process_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    set_ranks(group);
    return *this;
  }
  TORCH_ARG(double, grad_worker_fraction) = 1.0;
  TORCH_ARG(std::vector<std::string>, skip_layers) = {};
};
extern template struct OptionsOf<KFACPreconditionerOptions>;

/// KFAC without its update: step() replaces the gradients of the layers by the direction of K-FAC,
/// scaled by the KL clip, and another optimizer moves the parameters. Gradients of parameters
/// without a layer stay as they are. With torch::optim::SGD of the same lr and momentum the
/// parameters are those of KFAC, up to rounding. The weight decay of the other optimizer is not
/// preconditioned.
///
///     torchium::optim::KFACPreconditioner preconditioner(
///         *model, torchium::optim::KFACPreconditionerOptions(0.01));
///     torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
///     loss.backward();
///     preconditioner.step();
///     sgd.step();
///     sgd.zero_grad();
///
/// Errors, archives and report() are those of KFAC. A skipped step leaves all gradients as they
/// are.
class TORCHIUM_API KFACPreconditioner : public KFAC {
 public:
  /// All parameters of the model, which is not kept. Frozen ones take steps once they are thawed.
  explicit KFACPreconditioner(const torch::nn::Module& model,
                              KFACPreconditionerOptions defaults = {});
  /// Groups of its parameters.
  KFACPreconditioner(const torch::nn::Module& model,
                     const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                     KFACPreconditionerOptions defaults = {});
  ~KFACPreconditioner() override;
  KFACPreconditioner(KFACPreconditioner&&) noexcept;
  KFACPreconditioner& operator=(KFACPreconditioner&&) noexcept;

 protected:
  void check_together(const std::vector<const Options*>& groups) const override;
  void follow_schedules() override;
  c10::intrusive_ptr<detail::JointPlan> make_plan() const override;
  std::vector<std::string> skip_layers_of(const Options& options) const override;
  const char* name() const override { return "KFACPreconditioner"; }
};

}  // namespace torchium::optim
