// Natural gradient (Amari 1998; in the space of samples: Ren, Goldfarb 2019, arXiv 1906.02353;
// momentum: SPRING, Goldshlager, Abrahamsen, Lin 2024, arXiv 2401.10190) as a libtorch optimizer.
#pragma once

#include "torchium/export.h"
#include "torchium/gradients.h"
#include "torchium/optim/capturing_optimizer.h"
#include "torchium/optim/options.h"

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torchium::optim {

namespace detail {
class NaturalGradientPlan;
}  // namespace detail

/// Options of NaturalGradient; names and defaults are those of Python's `torchium.NaturalGradient`.
/// Groups may differ in lr, damping, momentum and maximize alone.
struct TORCHIUM_API NaturalGradientOptions : public OptionsOf<NaturalGradientOptions>,
                                             public SharedOptions {
  NaturalGradientOptions(double lr = 0.1);
  /// Learning rate, >= 0.
  TORCH_ARG(double, lr) = 0.1;
  /// Added to the Fisher matrix, > 0: in units of the squared gradient of a sample.
  TORCH_ARG(double, damping) = 1.0;
  /// Steps between two Fisher matrices, >= 1. A new value takes effect in the next step, but a
  /// matrix that the old value did not require comes one step later, because the end of a step
  /// decides whether layers are captured for the next.
  TORCH_ARG(int64_t, update_freq) = 1;
  /// Relative tolerance of conjugate gradients, > 0 (float32 parameters end near 1e-6).
  TORCH_ARG(double, eps) = 1e-8;
  /// Momentum, in [0, 1).
  TORCH_ARG(double, momentum) = 0.9;
  /// Bound of the norm of the direction, > 0; none: no bound.
  TORCH_ARG(std::optional<double>, max_norm) = std::nullopt;
  /// "gram" (a factorisation in the space of the rows of J), "explicit" (one in the space of the P
  /// parameters), "cg" (conjugate gradients) or "auto": with m the smaller of rows and P, the
  /// factorisation of order m if 16 m^2 <= max_workspace_bytes, else "cg".
  TORCH_ARG(std::string, solver) = "auto";
  /// Where the rows of J come from: "empirical", the gradients of the losses; "ggn", a square root
  /// of the Hessian of the loss with respect to the outputs (the generalized Gauss-Newton matrix);
  /// or "mc", targets drawn from the model's own distribution (the Fisher matrix). The last two
  /// need NaturalGradient::update_curvature(). A new value takes effect with the next matrix.
  TORCH_ARG(std::string, fisher) = "empirical";
  /// Rank of the Nystrom preconditioner of conjugate gradients, >= 0; 0: the dampings alone. It
  /// costs as many products with F as its rank, at each new matrix.
  TORCH_ARG(int64_t, nystrom_rank) = 0;
  /// Bound of the matrix of "auto" with its factor, and of the rows that "explicit" forms at a time
  /// (at least those of one sample), >= 1. With a process_group also of the layer calls that reach
  /// a rank at a time under "gram", of which two sets are in memory.
  TORCH_ARG(int64_t, max_workspace_bytes) = int64_t{1} << 28;
  /// NaturalGradient::update_damping() may be called. Needs momentum 0.
  TORCH_ARG(bool, adaptive_damping) = false;
  /// Ascend instead of descend.
  TORCH_ARG(bool, maximize) = false;
  /// Steps on a GPU are captured in CUDA graphs after some steps, and replayed: the same results
  /// with far less work for the host. "auto": where the memory that the graphs keep, with a copy of
  /// what was captured in the layers, is at most 5 % of the state or 1 % of that of the device;
  /// "always"; "never". After a change of an option other than lr, or of the shapes of a batch,
  /// the first steps are launched. With a process_group only "always" captures, where its backend
  /// is NCCL; destroy the optimizer before the group, which waits until no graph with a collective
  /// is left.
  TORCH_ARG(std::string, graphs) = "auto";
  /// A CUDA graph of the caller may capture step(), with the forward and backward pass. A step
  /// before the capture creates the state. Conjugate gradients keep the number of iterations of the
  /// capture. Needs update_freq 1 and nystrom_rank 0; not with a process_group or adaptive_damping.
  TORCH_ARG(bool, capturable) = false;

 public:
  /// The ranks that share the step, where parameters and gradients are the same on all of them and
  /// each has its own samples: the matrix is that of all samples. All ranks must call step(). In
  /// the defaults of the optimizer alone, and not saved. Null: no group.
  NaturalGradientOptions& process_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    set_ranks(group);
    return *this;
  }
};
extern template struct OptionsOf<NaturalGradientOptions>;

/// State of one parameter. With update_freq > 1 it has a part of the batch of the last refresh: the
/// J layer calls whose weight (or, without a weight, whose bias) it is.
struct TORCHIUM_API NaturalGradientParamState : public SecondOrderParamState {
  /// The last direction, if momentum > 0 in any group: the shape of the parameter.
  TORCH_ARG(at::Tensor, momentum_buffer);
  /// [J, 17] int64 on the CPU: kind, weight, bias, micro-batch, 12 settings, place among all
  /// calls. Weight and bias are positions in the parameters of all groups.
  TORCH_ARG(at::Tensor, uses);
  /// [J] float64 on the CPU: eps of norms.
  TORCH_ARG(at::Tensor, use_eps);
  /// [2] int64 on the CPU, with a process_group of several ranks: the rank whose samples they are,
  /// and the number of ranks. Another rank, or number of ranks, captures a batch of its own.
  TORCH_ARG(at::Tensor, use_ranks);
  /// 0-dim int64 on the CPU, with update_curvature(): the number of samples of the whole batch,
  /// which has a call for each column of its curvature.
  TORCH_ARG(at::Tensor, use_samples);
  /// Of each call, as captured.
  TORCH_ARG(std::vector<at::Tensor>, inputs);
  TORCH_ARG(std::vector<at::Tensor>, output_gradients);

 public:
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
  std::vector<NamedTensor> parameter_shaped() override;
  std::vector<NamedTensor> members() override;
  std::vector<NamedList> lists() override;
  void convert_to(const at::Tensor& param) override;
};

/// How a step was solved. With a process_group numbers are those of all ranks together. `<<` writes
/// a table.
struct TORCHIUM_API NaturalGradientReport {
  /// "gram", "explicit" or "cg"; empty before the first step.
  std::string solver;
  /// Samples in the Fisher matrix.
  int64_t samples = 0;
  /// Rows of J: one per sample, or one per sample and column of its curvature.
  int64_t rows = 0;
  /// Of conjugate gradients, else 0.
  int64_t iterations = 0;
  double relative_residual = 0.0;
  /// Scratch memory of captured steps.
  int64_t graph_bytes = 0;

  TORCHIUM_API friend std::ostream& operator<<(std::ostream& stream,
                                               const NaturalGradientReport& report);
};

/// Natural gradient with the damped Fisher matrix of the batch, for a loss that is a mean over the
/// samples. Only the operators of CapturingOptimizer may use a parameter, unless update_jacobian()
/// is used. What is added to its gradient after the backward pass, such as weight decay, is a part
/// of the gradient, but not of the Fisher matrix.
///
/// The constructors throw c10::ValueError for a layer of torch::nn with trainable parameters that
/// is not supported, such as recurrent and transformer layers. step() throws it, and changes
/// nothing, for a batch that cannot be split into samples: BatchNorm in training, a parameter that
/// other operators use too, layers that disagree on the number of samples.
///
///     torchium::optim::NaturalGradient optimizer(*model);
class TORCHIUM_API NaturalGradient : public CapturingOptimizer {
 public:
  /// All parameters of the model, which is not kept. Frozen ones take steps once they are thawed.
  explicit NaturalGradient(const torch::nn::Module& model, NaturalGradientOptions defaults = {});
  /// Groups of its parameters.
  NaturalGradient(const torch::nn::Module& model,
                  const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                  NaturalGradientOptions defaults = {});
  ~NaturalGradient() override;
  NaturalGradient(NaturalGradient&&) noexcept;
  NaturalGradient& operator=(NaturalGradient&&) noexcept;

  /// torchium::per_sample_gradients().
  static torch::OrderedDict<std::string, at::Tensor> compute_per_sample_gradients(
      const torch::nn::Module& model, const ForwardFunction& forward, const LossFunction& loss_fn,
      const at::Tensor& inputs, const at::Tensor& targets);

  /// fisher "mc" and "ggn": the matrix of the next step, from outputs [N, ...] of the model with
  /// their graph. KFAC::update_curvature() has the arguments, the losses and the errors. With S the
  /// Jacobian with respect to the parameters times a square root of the Hessian, C rows per sample
  /// for C columns, F = S^T S / N over the N samples of all calls since the last step or
  /// zero_grad(). Calls for several outputs of one forward pass, as of heads, have the same ones: F
  /// is that of the sum of their losses, each with the weight 1, whatever its factor is in
  /// backward(); for another weight see there. Every head of the loss needs a call. Does nothing in
  /// steps that keep their matrix (update_freq).
  using CapturingOptimizer::update_curvature;

  /// The next step minimizes r . r / (2 n) for n residuals r with the Jacobian J [n, parameters],
  /// which the caller has computed, as with second derivatives of the model: F = J^T J / n. Sets
  /// `.grad` of every parameter to J^T r / n, and replaces what was captured. For a
  /// weighted loss, multiply rows and residuals by the square roots of the weights. Does not wait
  /// for the device.
  ///
  /// rows: one tensor [n, *shape] per parameter, in the order of the groups, of its dtype and on
  /// its device; residuals: [n]. They are not copied, and must not change until step(). Throws
  /// c10::ValueError, and changes nothing, for tensors that do not fit and with update_freq
  /// above 1.
  ///
  /// With a process_group all ranks must call it. Each gives its own rows and residuals, n counts
  /// those of all ranks, and all ranks get the same gradients.
  void update_jacobian(const std::vector<at::Tensor>& rows, const at::Tensor& residuals);

  /// Adapts the damping of all groups by the rule of Levenberg and Marquardt, as
  /// KFAC::update_damping() does. The predicted reduction of a step d is (lr nu - lr^2 nu^2 / 2)
  /// v . d, with v the gradient and nu the factor of max_norm. With a process_group all ranks must
  /// call it; the losses are the means of those that the ranks give.
  double update_damping(double loss_before, double loss_after);

  /// Of the last step; waits for the device.
  NaturalGradientReport report() const;

 protected:
  void check_together(const std::vector<const Options*>& groups) const override;
  std::unique_ptr<SecondOrderParamState> make_empty_state() const override;
  c10::intrusive_ptr<detail::JointPlan> make_plan() const override;
  bool captures_next() override;
  void check_layers(const std::vector<at::Tensor>& active) override;
  const char* name() const override { return "NaturalGradient"; }
  std::function<void()> read_more(torch::serialize::InputArchive& archive) override;

 private:
  detail::NaturalGradientPlan& plan() const;
  void check_known_layers(const std::vector<at::Tensor>& params) const;
};

}  // namespace torchium::optim
