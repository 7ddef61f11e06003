// K-FAC (Martens and Grosse 2015, arXiv 1503.05671; convolutions: Grosse and Martens 2016, arXiv
// 1602.01407; several positions: Eschenhagen et al. 2023, arXiv 2311.00636) as a libtorch
// optimizer.
#pragma once

#include "torchium/export.h"
#include "torchium/optim/capturing_optimizer.h"
#include "torchium/optim/options.h"
#include "torchium/optim/schedules.h"

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace torchium::optim {

namespace detail {
class KfacPlan;
}  // namespace detail

/// Options of KFAC; names and defaults are those of Python's `torchium.KFAC`. batch_averaged,
/// kl_clip, damping_split, ekfac, solver, fisher and adaptive_damping must be the same in all
/// groups; for the others, the group of the weight decides for a layer.
struct TORCHIUM_API KFACOptions : public OptionsOf<KFACOptions>, public SharedOptions {
  KFACOptions(double lr = 0.003);
  using structures_t = std::tuple<std::string, std::string>;
  /// Learning rate, >= 0.
  TORCH_ARG(double, lr) = 0.003;
  /// Momentum of the direction, in [0, 1).
  TORCH_ARG(double, momentum) = 0.9;
  /// L2 penalty, >= 0.
  TORCH_ARG(double, weight_decay) = 0.0;
  /// Added to the Fisher matrix, >= 0.
  TORCH_ARG(double, damping) = 0.01;
  /// Steps between two updates of the factors, >= 1. A new value takes effect in the next step.
  TORCH_ARG(int64_t, TCov) = 5;
  /// Steps between two inversions of the factors, >= 1.
  TORCH_ARG(int64_t, TInv) = 10;
  /// The loss is a mean over the samples, not a sum.
  TORCH_ARG(bool, batch_averaged) = true;
  /// Floor of the damping of a factor, and with damping_split "exact" of its eigenvalues, >= 0.
  TORCH_ARG(double, eps) = 1e-8;
  /// Decay of the averages of the factors, in [0, 1].
  TORCH_ARG(double, stat_decay) = 0.95;
  /// Bound of the step in the metric of the Fisher matrix, > 0; none: no bound.
  TORCH_ARG(std::optional<double>, kl_clip) = 1e-3;
  /// "pi" (pi^2 is the ratio of the mean eigenvalues of A and G), "plain" (pi = 1) or "exact".
  TORCH_ARG(std::string, damping_split) = "pi";
  /// EKFAC (George et al. 2018, arXiv 1806.03884): the second moments of the gradients of samples
  /// in the eigenbasis of A and G replace the products of their eigenvalues. Needs damping_split
  /// "exact".
  TORCH_ARG(bool, ekfac) = false;
  /// How factors are inverted: "eigh"; "cholesky", and eigh on the CPU where a pivot is lost in
  /// rounding; "newton", which raises a damping below 2^-20 of the factor's Frobenius norm to that
  /// value (2^-46 in float64); or "auto": newton in float32 on a CUDA device with kernels for it,
  /// else cholesky. damping_split "exact" needs eigenvectors: "eigh" or "auto".
  ///
  /// "inverse_free" (SINGD: Lin et al. 2024, arXiv 2312.05705) inverts nothing. Instead of A and G
  /// it stores K and C, with K K^T (x) C C^T near (A (x) G + damping I)^-1, and corrects them with
  /// the factors of every TCov-th step, at the rate 1 - stat_decay. TInv and damping_split have no
  /// meaning then, and must have their defaults.
  TORCH_ARG(std::string, solver) = "auto";
  /// "inverse_free": the structures of K and of C. "dense"; "block_diagonal", with blocks of
  /// block_size; "toeplitz", lower triangular; or "diagonal". A new value applies only to factors
  /// that do not exist yet.
  TORCH_ARG(structures_t, structures) = std::make_tuple("dense", "dense");
  /// "block_diagonal": order of the blocks but the last, >= 2. As structures.
  TORCH_ARG(int64_t, block_size) = 32;
  /// "inverse_free": decay of the averages m_K and m_C, in [0, 1).
  TORCH_ARG(double, alpha1) = 0.5;
  /// Where the vectors g come from: "empirical", the gradients of the loss; "ggn", the Hessian of
  /// the loss with respect to the model's outputs (the generalized Gauss-Newton matrix); or "mc",
  /// an estimate of it by targets drawn from the model's own distribution (the Fisher matrix). The
  /// last two need KFAC::update_curvature(). A new value takes effect with the next factors.
  TORCH_ARG(std::string, fisher) = "empirical";
  /// Several positions of a sample, in sequences and convolutions: "expand", each is a vector a and
  /// a vector g, or "reduce", one a per sample, the mean over its positions, and one g, their sum.
  /// A new value takes effect with the next factors.
  TORCH_ARG(std::string, weight_sharing) = "expand";
  /// Only the diagonal is kept of a factor of a larger order, >= 1, and always of G of an
  /// embedding; "inverse_free": of a factor of structure "dense". A new value applies only to
  /// factors that do not exist yet.
  TORCH_ARG(int64_t, max_factor_size) = 5000;
  /// Dtype of the stored factors A and G, or K, C, m_K and m_C: "bfloat16", "float32" or "float64";
  /// none: the state dtype. Sums, and what is computed from bfloat16 factors, are in float32. A new
  /// value converts the factors.
  TORCH_ARG(std::optional<std::string>, factor_dtype) = std::nullopt;
  /// KFAC::update_damping() may be called. Needs momentum 0.
  TORCH_ARG(bool, adaptive_damping) = false;
  /// Ascend instead of descend.
  TORCH_ARG(bool, maximize) = false;
  /// Steps on a GPU without new factors and inverses are captured in CUDA graphs after some steps,
  /// and replayed: the same results with far less work for the host. "auto": where the memory that
  /// the graphs keep is at most 5 % of the state or 1 % of that of the device; "always"; "never".
  /// Steps that ranks share, of solver "inverse_free", with ekfac, adaptive_damping or another
  /// factor_dtype, or of parameters that no kernel supports, are launched. A change of another
  /// option than lr begins with launched steps.
  TORCH_ARG(std::string, graphs) = "auto";
  /// A CUDA graph of the caller may capture step(), with the forward and backward pass: every step
  /// updates the factors, and only KFAC::update_preconditioners() inverts them, besides the step in
  /// which they are new. TCov and TInv have no meaning then. A step before the capture creates
  /// state and inverses. Not with a process_group, schedules, adaptive_damping or "inverse_free".
  TORCH_ARG(bool, capturable) = false;
  /// damping, TCov, TInv, stat_decay and kl_clip as functions of the step; the values above follow.
  TORCH_ARG(Schedules, schedules) = {};

 public:
  /// The ranks that share the step, where parameters and gradients are the same on all of them and
  /// each has its own samples: factors are those of all samples. All ranks must call step(). In the
  /// defaults of the optimizer alone, and not saved. Null: no group.
  KFACOptions& process_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    set_ranks(group);
    return *this;
  }
  /// With a process_group of W ranks: the share of the ranks that keep the inverses of a layer and
  /// compute its direction, max(1, round(grad_worker_fraction W)) of them at most, in (0, 1]. 1:
  /// inverses are sent when they are due, and nothing else; 1 / W: one rank keeps them, and sends
  /// the direction in every step (KAISA: Pauloski et al. 2021, arXiv 2107.01739). ekfac needs 1. In
  /// the defaults of the optimizer alone, and not saved.
  TORCH_ARG(double, grad_worker_fraction) = 1.0;
  /// Regular expressions: layers with one in their name ("encoder\\.0") or type ("Linear") have no
  /// factors, and take steps of SGD with momentum. Set in the defaults alone.
  TORCH_ARG(std::vector<std::string>, skip_layers) = {};
};
extern template struct OptionsOf<KFACOptions>;

/// State of one parameter. The weight of a layer has the layer's factors: one matrix per channel
/// group, in the state dtype (A and G: in factor_dtype). a is the fan-in of a group, plus one with
/// a bias; o is the number of outputs. A factor above max_factor_size, and G of an embedding, is
/// stored as its diagonal, [groups, n] instead of [groups, n, n], and so are its inverse or
/// eigenvectors (the identity).
struct TORCHIUM_API KFACParamState : public SecondOrderParamState {
  /// If momentum > 0: the shape of the parameter.
  TORCH_ARG(at::Tensor, momentum_buffer);
  /// [groups, a, a]: average of a a^T over samples and positions, or with weight_sharing "reduce"
  /// over samples.
  TORCH_ARG(at::Tensor, A);
  /// [groups, o / groups, o / groups]: average of g g^T over samples, summed over positions.
  TORCH_ARG(at::Tensor, G);
  /// "pi" and "plain": the damped inverses.
  TORCH_ARG(at::Tensor, A_inverse);
  TORCH_ARG(at::Tensor, G_inverse);
  /// "exact": eigenvectors in columns.
  TORCH_ARG(at::Tensor, A_eigenvectors);
  TORCH_ARG(at::Tensor, G_eigenvectors);
  /// "exact": [groups, a] and [groups, o / groups].
  TORCH_ARG(at::Tensor, A_eigenvalues);
  TORCH_ARG(at::Tensor, G_eigenvalues);
  /// ekfac: [groups, o / groups, a], average of the squares of U_G^T D U_A over samples, with D
  /// their gradients and U the eigenvectors; the product of the eigenvalues until the first update.
  TORCH_ARG(at::Tensor, second_moments);
  /// ekfac: updates of second_moments so far: 0-dim float32, see factor_updates.
  TORCH_ARG(at::Tensor, moment_updates);
  /// A norm's weight with C elements: [C, 2, 2], or [C, 1, 1] without a bias; average over samples
  /// of (u, v) (u, v)^T for the gradients u of the weight and v of the bias, element by element.
  TORCH_ARG(at::Tensor, fisher_blocks);
  /// Updates k of the factors so far: 0-dim float32. It stops at 2^24, which is harmless: it only
  /// enters the decay min(1 - 1/k, stat_decay) and the test for the first update. With
  /// stat_decay = 1 the mean becomes a running average over about 2^24 updates from then on.
  TORCH_ARG(at::Tensor, factor_updates);
  /// Consecutive failures to invert A and G, or to correct K and C: int32 [2].
  TORCH_ARG(at::Tensor, root_failures);
  /// solver "inverse_free", instead of A, G and their inverses, in factor_dtype; the identity at
  /// first. With n = a or o / groups, [groups, n, n]; block-diagonal: [groups, n, block_size], row
  /// i has the entries of its block; Toeplitz: [groups, n, 1], the first column; diagonal: [groups,
  /// n].
  TORCH_ARG(at::Tensor, K);
  TORCH_ARG(at::Tensor, C);
  /// If alpha1 > 0: as K and C.
  TORCH_ARG(at::Tensor, m_K);
  TORCH_ARG(at::Tensor, m_C);

 public:
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
  std::vector<NamedTensor> parameter_shaped() override;
  /// The members that only a weight with factors has.
  std::vector<NamedTensor> factors();
  std::vector<NamedTensor> members() override;
  bool is_of(const at::Tensor& param) override;
  void convert_to(const at::Tensor& param) override;
};

/// How the last step treated a parameter.
struct KFACParameterReport {
  /// In the model.
  std::string name;
  /// "factors"; "diagonal": with a factor that is stored as its diagonal; "unit-wise": scale or
  /// shift of a norm; "fallback": a step of SGD with momentum; or "none".
  std::string treatment;
  /// The orders of the factors or blocks, or why there are none.
  std::string detail;
};

/// Which parameters the last steps preconditioned, by name in the model. `<<` writes a table with
/// one line per parameter.
struct TORCHIUM_API KFACReport {
  /// All of them, in the order of the groups.
  std::vector<KFACParameterReport> parameters;
  std::vector<std::string> preconditioned;
  /// Parameters that take steps of SGD with momentum.
  std::vector<std::string> fallback;
  /// Weights whose factor, or whose K or C, is stored as its diagonal.
  std::vector<std::string> diagonal_A;
  std::vector<std::string> diagonal_G;
  /// Memory that captured steps keep.
  int64_t graph_bytes = 0;

  TORCHIUM_API friend std::ostream& operator<<(std::ostream& stream, const KFACReport& report);
};

/// K-FAC for linear layers, convolutions and transposed convolutions of one to three dimensions,
/// embeddings, and layer, RMS, group and batch norms, as modules or as operators
/// (CapturingOptimizer). Scale and shift of a norm have a 2 x 2 block of the Fisher matrix for each
/// channel (unit-wise: Osawa et al. 2019, arXiv 1811.12019, section 4.2), in which the statistics
/// of a batch count as constants. A weight may be [in, out], as in addmm(b, x, W), or also be an
/// embedding table (a tied head). The bias of a transposed convolution has no factors. All others
/// take steps of SGD with momentum: tables whose rows all samples share, such as those of positions
/// [T]; parameters of other operators; weights that other operators use too; and parameters of
/// recurrent and transformer layers. A warning counts them and names some; report() names all.
///
/// Calls of a layer in one backward pass are positions of the same samples: a batch that goes
/// through the model in parts needs a backward() for each part. Dimension 0 of a layer's input
/// counts as the samples, and G is in proportion to their number: a warning names layers with more
/// or fewer than most, such as windows of images or tokens of experts.
///
///     torchium::optim::KFAC optimizer(*model, torchium::optim::KFACOptions(0.01).TInv(20));
class TORCHIUM_API KFAC : public CapturingOptimizer {
 public:
  /// All parameters of the model, which is not kept. Frozen ones take steps once they are thawed.
  explicit KFAC(const torch::nn::Module& model, KFACOptions defaults = {});
  /// Groups of its parameters.
  KFAC(const torch::nn::Module& model,
       const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
       KFACOptions defaults = {});
  ~KFAC() override;
  KFAC(KFAC&&) noexcept;
  KFAC& operator=(KFAC&&) noexcept;

  /// fisher "mc" and "ggn": the factors G of the next step, from outputs [N, ...] of the model with
  /// their graph, by backward passes that change no gradient and keep the graph. Called in each
  /// iteration, once per micro-batch, between the forward pass and step(), before a backward() that
  /// does not retain the graph; does nothing in steps without new factors (TCov). The factors are
  /// means over the samples of all calls since the last step or zero_grad().
  ///
  /// Calls for several outputs of one forward pass, as of heads, have the same samples: their
  /// curvatures add up to that of the sum of the losses, whatever the factors of these are in
  /// backward(). For a loss with the weight w pass outputs.detach().lerp(outputs, std::sqrt(w)),
  /// which has the same values and sqrt(w) times the Jacobian. Without a call for a head, its own
  /// layers have no factors.
  ///
  /// loss: "cross_entropy", "mse" or "bce" (with logits), each as torch's function of that name,
  /// with factor 1; G does not depend on targets, the factor of the loss or a loss scale. "ggn"
  /// takes a backward pass for each element of a sample's outputs, "mc" options.samples() of them.
  /// Where an output depends on several samples, as the similarities of a contrastive loss do,
  /// "ggn" adds cross terms of samples to G, and "mc" none in expectation. "ggn" takes no outputs
  /// of several rows for one sample, as flattened tokens, where gradients are summed over the
  /// positions of a sample (weight_sharing "reduce", ekfac, NaturalGradient). Does not wait for the
  /// device. Throws c10::ValueError for outputs and options that do not fit, and c10::Error for
  /// fisher "empirical" and for a graph that was freed; nothing has changed then.
  ///
  ///     auto outputs = model->forward(inputs);
  ///     optimizer.update_curvature(outputs, "cross_entropy");
  ///     torch::nn::functional::cross_entropy(outputs, targets).backward();
  ///     optimizer.step();
  using CapturingOptimizer::update_curvature;

  KFACReport report() const;

  /// Inverts the factors of all layers as they are now, regardless of TInv. With capturable = true
  /// only this function does: call it between the replays of a captured step(). Before the first
  /// step, after a load, and for layers without a gradient in the last step, their next step does
  /// it. With a process_group all ranks must call it.
  void update_preconditioners();

  /// Adapts the damping of all groups by the rule of Levenberg and Marquardt (Martens and Grosse
  /// 2015, section 6.5), which needs adaptive_damping. The losses are those of one batch before and
  /// after the last step, with all terms that its gradient contained. With the k steps since the
  /// last call, or since the optimizer was made or loaded,
  ///
  ///     ratio = (loss_before - loss_after) / sum (lr nu - lr^2 nu^2 / 2) V . D
  ///
  /// over the layers, where nu is the factor of the KL clip, multiplies the damping by 0.95^k if it
  /// is above 3/4 and divides by it if it is below 1/4 or loss_after is not finite. The sum is the
  /// reduction in the quadratic model of K-FAC. A step that predicts none (skipped, or with lr nu
  /// of 0 or above 2) changes nothing. Inverses have the new damping when they are due.
  ///
  /// Returns the ratio; -infinity: loss_after is not finite; NaN: no reduction was predicted. Waits
  /// for the device. Throws c10::ValueError without adaptive_damping, for a loss_before that is not
  /// finite, if no step was taken since the last call, for groups of different lr, if damping is a
  /// function of the step, and for a KFACPreconditioner. With a process_group all ranks must call
  /// it; the losses are the means of those that the ranks give.
  double update_damping(double loss_before, double loss_after);

 protected:
  // For constructors of derived classes, which call initialize().
  KFAC(const torch::nn::Module& model, std::unique_ptr<Options> defaults);

  void check_together(const std::vector<const Options*>& groups) const override;
  void follow_schedules() override;
  std::unique_ptr<SecondOrderParamState> make_empty_state() const override;
  std::optional<StateMap> whole_state() const override;
  c10::intrusive_ptr<detail::JointPlan> make_plan() const override;
  virtual std::vector<std::string> skip_layers_of(const Options& options) const;
  bool is_watched(const at::Tensor& param) const override;
  bool captures_next() override;
  bool takes_batch_norm() const override { return true; }
  void announce() override;
  const char* name() const override { return "KFAC"; }
  void save_more(torch::serialize::OutputArchive& archive) const override;
  std::function<void()> read_more(torch::serialize::InputArchive& archive) override;

 private:
  KFACParamState* state_of(const at::Tensor& param) const;
  detail::KfacPlan& plan() const;
  bool is_skipped(const at::Tensor& param) const;
  void announce_unmatched_skips() const;
  std::string why_not(const at::Tensor& param) const;
};

}  // namespace torchium::optim
