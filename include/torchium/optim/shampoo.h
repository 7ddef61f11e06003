// Shampoo (Gupta, Koren, Singer 2018, arXiv 1802.09568; blocks and grafting: Anil et al. 2020,
// arXiv 2002.09018; Shi et al. 2023, arXiv 2309.06497) as a libtorch optimizer.
#pragma once

#include "torchium/export.h"
#include "torchium/optim/blocked_optimizer.h"
#include "torchium/optim/options.h"
#include "torchium/optim/shampoo_report.h"

#include <torch/nn/module.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace torchium::gradients::detail {
class ModelLayers;
}

namespace torchium::optim {

/// Options of Shampoo; names and defaults are those of Python's `torchium.Shampoo`.
struct TORCHIUM_API ShampooOptions : public OptionsOf<ShampooOptions>, public SharedOptions {
  ShampooOptions(double lr = 0.03);
  using betas_t = std::tuple<double, double>;
  /// Learning rate, >= 0.
  TORCH_ARG(double, lr) = 0.03;
  /// Damping: the roots are those of L + eps I; >= 0.
  TORCH_ARG(double, eps) = 1e-4;
  /// Steps between two computations of the roots, >= 1.
  TORCH_ARG(int64_t, update_freq) = 100;
  /// L2 penalty, >= 0.
  TORCH_ARG(double, weight_decay) = 0.0;
  /// Decay of the averaged gradient, in [0, 1), and of the statistics, in [0, 1]; 1 sums them.
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.0, 1.0);
  /// Momentum of the update, in [0, 1).
  TORCH_ARG(double, momentum) = 0.0;
  /// Nesterov's momentum; needs momentum > 0.
  TORCH_ARG(bool, nesterov) = false;
  /// p <- (1 - lr weight_decay) p instead of a penalty in the gradient.
  TORCH_ARG(bool, decoupled_weight_decay) = false;
  /// Additional damping, as a fraction of the largest eigenvalue, >= 0.
  TORCH_ARG(double, relative_eps) = 0.0;
  /// Dimensions longer than this are cut into blocks, >= 1.
  TORCH_ARG(int64_t, block_size) = 1024;
  /// Merge adjacent dimensions of tensors of order above two while their product stays within
  /// block_size; a tensor of order four, such as the weight of a Conv2d, becomes [out, in kh kw].
  TORCH_ARG(bool, merge_dims) = true;
  /// Merge dimensions by the rule of Distributed Shampoo's target_parameter_dimensionality instead.
  /// t >= 1: dimensions of size one are dropped, and adjacent ones merge, from the last backwards,
  /// while their product stays within block_size and more than t are left; with 1 a small matrix
  /// becomes a vector, which preconditioner_1d rules. 0, its infinity: the shape as it is, with
  /// dimensions of size one. Needs merge_dims.
  TORCH_ARG(std::optional<int64_t>, target_order) = std::nullopt;
  /// Exponent of the roots; none: -1/(2k) for a tensor of order k.
  TORCH_ARG(std::optional<double>, exponent) = std::nullopt;
  /// During this many first steps of a parameter the exponent goes from -1/(2k) to `exponent`, as
  /// -1/p with whole numbers p; update_preconditioners() and capturable steps use `exponent` at
  /// once.
  TORCH_ARG(int64_t, exponent_warmup) = 0;
  /// "diagonal" or "full": the preconditioner of vectors and scalars.
  TORCH_ARG(std::string, preconditioner_1d) = "diagonal";
  /// false: no matrices precondition the parameters. With grafting "adagrad", "rmsprop" or "adam"
  /// they take the direction of the grafted method itself, and keep only its state (with
  /// from_adamw(), AdamW's step); else m (a / c + eps)^(-1/2) with the diagonal of the statistics.
  TORCH_ARG(bool, preconditioned) = true;
  /// A parameter with a longer dimension, after merging, is treated as with
  /// preconditioned = false: an embedding or a head with a large vocabulary, for which the matrices
  /// of the other dimension alone would cost more than the rest of its step. None: no limit; else
  /// >= 1.
  TORCH_ARG(std::optional<int64_t>, max_preconditioned_dim) = 16384;
  /// The method whose step length each block takes: none, "sgd", "adagrad", "rmsprop" or "adam".
  TORCH_ARG(std::optional<std::string>, grafting) = std::nullopt;
  /// Added to the denominator of the grafted method, >= 0.
  TORCH_ARG(double, grafting_eps) = 1e-8;
  /// Decay of the grafted method's second moment, in [0, 1); none: betas[1], or 0.999 if that is 1.
  TORCH_ARG(std::optional<double>, grafting_beta2) = std::nullopt;
  /// Before this step the grafted direction (or the gradient) is used, >= 1.
  TORCH_ARG(int64_t, start_preconditioning_step) = 1;
  /// "auto", "eigh" or "newton".
  TORCH_ARG(std::string, root_method) = "auto";
  /// dtype of the stored roots: "bfloat16" halves their memory, with an error of at most 0.4 % per
  /// entry; none: the state dtype. A change converts the roots in the next step.
  TORCH_ARG(std::optional<std::string>, root_dtype) = std::nullopt;
  /// Precision of the products with gradients on a GPU: "highest" (operands of at least 22 bits) or
  /// "high" (11 bits, as TF32: statistics and directions have relative errors of about 4e-4); none:
  /// "highest" unless at::globalContext() allows TF32. A CPU computes in float32.
  TORCH_ARG(std::optional<std::string>, matmul_precision) = std::nullopt;
  /// Consecutive failed roots of one matrix after which a step raises, >= 1.
  TORCH_ARG(int64_t, max_root_failures) = 3;
  /// Ascend instead of descend.
  TORCH_ARG(bool, maximize) = false;
  /// step() never computes roots, so that it can be captured in a CUDA graph; call
  /// Shampoo::update_preconditioners() for them. On a GPU only check_errors() then reports errors.
  /// With a process_group this needs the backend NCCL, and no host waits.
  TORCH_ARG(bool, capturable) = false;
  /// Steps on a GPU are captured in CUDA graphs after some steps, and replayed: the same results
  /// with far less work for the host. "auto": where the memory that the graphs keep is at most 5 %
  /// of the state or 1 % of that of the device; "always"; "never". Steps that a caller captures are
  /// not affected.
  TORCH_ARG(std::string, graphs) = "auto";

  // The rest is the same for all groups, taken from the defaults of the optimizer, and not saved.

  /// dtype in which the directions of float32 state travel between the ranks of `process_group`:
  /// kFloat, kBFloat16 or kHalf; those of float64 parameters travel in float64.
  TORCH_ARG(at::ScalarType, comm_dtype) = at::kFloat;
  /// Directions travel in buckets. A rank receives at most this many bytes of a bucket, or one
  /// block of each rank if that is more, while it applies the bucket that has arrived; >= 1. Each
  /// rank keeps memory for two buckets.
  TORCH_ARG(int64_t, bucket_bytes) = int64_t{1} << 25;

 public:
  /// Options of a replacement for AdamW: its lr, betas and decoupled weight decay; grafting_eps is
  /// its eps, and eps the square of that. The others are grafting = "adam", exponent = -0.5,
  /// exponent_warmup = 100, relative_eps = 1e-3 and update_freq = 10, found with
  /// benchmarks/early_steps.py.
  /// Throws c10::ValueError for amsgrad = true and an eps below 0.
  static ShampooOptions from_adamw(const torch::optim::AdamWOptions& adamw = {});
  /// The same for Adam, whose weight decay is an L2 penalty.
  static ShampooOptions from_adamw(const torch::optim::AdamOptions& adam);

  /// The ranks that share the step, where parameters and gradients are the same on all of them.
  /// Each keeps the state of its own blocks and computes their directions, which all gather. All
  /// ranks must call step(), and save(), which then writes the whole state on each. Null: no group,
  /// this process takes the whole step. Several processes without a group repeat the step: Python
  /// warns of that, C++ does not, because it has no list of process groups.
  ShampooOptions& process_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    set_ranks(group);
    return *this;
  }
};
extern template struct OptionsOf<ShampooOptions>;

/// State of one parameter. The tensors below have its shape and the state dtype.
struct TORCHIUM_API ShampooParamState : public MatrixParamState {
  /// Diagonal of the statistics, for parameters with the diagonal rule, which have no matrices.
  TORCH_ARG(at::Tensor, diagonal);
  /// Average of the gradients, if betas[0] > 0.
  TORCH_ARG(at::Tensor, exp_avg);
  /// Second moment of "adagrad", "rmsprop" and "adam" grafting.
  TORCH_ARG(at::Tensor, grafting_second_moment);
  /// If momentum > 0.
  TORCH_ARG(at::Tensor, momentum_buffer);
  /// `step` when these averages began; undefined: 0. Their bias corrections count from there, so
  /// that betas[0] and grafting may be switched on during a run. 0-dim float64.
  TORCH_ARG(at::Tensor, exp_avg_start);
  TORCH_ARG(at::Tensor, grafting_second_moment_start);

 public:
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
  std::vector<NamedTensor> parameter_shaped() override;
  std::vector<NamedTensor> counts() override;

 protected:
  bool consists_of(const detail::ParameterState& tensors) const override;
};

/// Shampoo on parameters of order 0 to 5.
///
///     torchium::optim::Shampoo optimizer(*model,
///                                        torchium::optim::ShampooOptions(0.1).update_freq(20));
class TORCHIUM_API Shampoo : public BlockedOptimizer {
 public:
  explicit Shampoo(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                   ShampooOptions defaults = {});
  explicit Shampoo(std::vector<at::Tensor> params, ShampooOptions defaults = {});
  /// All parameters of the model, each once, under their names there. The parameters of
  /// torch::nn::Embedding and EmbeddingBag, also if a head shares them, are a second group, with
  /// preconditioned = false. The optimizer does not keep the model.
  explicit Shampoo(const torch::nn::Module& model, ShampooOptions defaults = {});

  /// Changes the options that from_adamw() chooses; called with those of every group.
  using AdjustOptions = std::function<void(ShampooOptions&)>;

  /// A Shampoo that replaces `optimizer`: its parameter groups, with ShampooOptions::from_adamw()
  /// of their options. Every block of a matrix takes a step of the length that AdamW would take;
  /// parameters of order 0 and 1 step as with AdamW. The state starts fresh. `optimizer` is not
  /// changed, and must no longer be stepped.
  ///
  ///     auto optimizer = torchium::optim::Shampoo::from_adamw(
  ///         adamw, [](auto& options) { options.update_freq(20); });
  static Shampoo from_adamw(const torch::optim::AdamW& optimizer,
                            const AdjustOptions& adjust = nullptr);
  static Shampoo from_adamw(const torch::optim::Adam& optimizer,
                            const AdjustOptions& adjust = nullptr);
  /// The same for parameter groups, whose options, if any, are AdamWOptions or AdamOptions.
  static Shampoo from_adamw(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                            const torch::optim::AdamWOptions& defaults = {},
                            const AdjustOptions& adjust = nullptr);
  static Shampoo from_adamw(std::vector<at::Tensor> params,
                            const torch::optim::AdamWOptions& defaults = {},
                            const AdjustOptions& adjust = nullptr);
  /// The same for the parameters of a model, in the groups of Shampoo(model): embeddings step as
  /// with AdamW.
  static Shampoo from_adamw(const torch::nn::Module& model,
                            const torch::optim::AdamWOptions& defaults = {},
                            const AdjustOptions& adjust = nullptr);

  /// Computes all roots from the statistics now, regardless of update_freq. With capturable = true
  /// only this function changes them.
  void update_preconditioners();

  /// With capturable = true a captured step reads its learning rate from a tensor on the device.
  /// This writes the options' lr to it: call it after a change of lr, before a replay.
  void sync_lr();

  /// For each parameter the rule, the blocks or the reason, and the bytes of state.
  ShampooReport report() const;

 protected:
  std::unique_ptr<SecondOrderParamState> make_empty_state() const override;
  c10::intrusive_ptr<detail::BlockedPlans> make_plans() const override;
  const char* name() const override { return "Shampoo"; }
  std::string name_in_model(const at::Tensor& param) const override;
  int64_t max_root_failures(const Options& options) const override;

 private:
  // Null without a model.
  std::shared_ptr<const gradients::detail::ModelLayers> layers_;
};

}  // namespace torchium::optim
