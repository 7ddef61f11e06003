// Gradients of single samples, and what can be computed from them without forming them.
#pragma once

#include "torchium/export.h"
#include "torchium/register_layer.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace torchium {

using ForwardFunction = std::function<at::Tensor(const at::Tensor& inputs)>;
using LossFunction = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

/// The gradient of each sample's loss, for every trainable parameter.
///
/// Row i of an entry is the gradient of `loss_fn(forward(inputs[i:i+1]), targets[i:i+1])`, so the
/// mean of the rows is the gradient of a mean loss. No gradient, parameter, buffer or random state
/// changes. Also works under a NoGradGuard.
///
/// One pass over the batch suffices if the parameters are used only by linear (addmm, matmul, mm),
/// conv1d to conv3d, their transposed forms, embedding, layer_norm, rms_norm or group_norm, with
/// the sample in dimension 0 of the input. This is checked: each row must depend only on its own
/// sample's loss, the first sample must give the same values when alone in the batch, and all
/// samples the same when the batch is rolled by one. Layers of your own may have a formula
/// (register_layer()). All other models (recurrent layers, attention, time in dimension 0,
/// positions that samples share, values of the batch that `forward` reads by item(), equal() or
/// allclose(); reads through data_ptr() or an accessor go unnoticed) need one pass per sample,
/// which is slow for a batch; a warning gives the reason. Parameter hooks run in that case, as in
/// torch::autograd::grad().
///
///     auto gradients = torchium::per_sample_gradients(
///         *model, [&](const auto& x) { return model->forward(x); },
///         [](const auto& y, const auto& t) { return torch::nn::functional::cross_entropy(y, t); },
///         inputs, targets);
///     gradients["0.weight"];  // [batch, out, in]
///
/// @param model owns the parameters; frozen ones are left out.
/// @param forward inputs [batch, ...] -> output [batch, ...]; called on batches of one too.
/// @param loss_fn (output [1, ...], target [1, ...]) -> one number. One call under vmap evaluates
///   it for all samples; a function that reads values is called for each sample. If it returns
///   [batch] for a batch, the loss of each sample (reduction `torch::kNone`), it is called for the
///   batch and its halves instead; losses that differ between the two are not used.
/// @param inputs, targets [batch, ...].
/// @param max_workspace_bytes bounds the patches of convolutions that exist at a time, of at least
///   one sample. Inputs and output gradients of the layers, for the whole batch, are not counted.
/// @return name -> [batch, shape of the parameter...], in the parameter's dtype and the order of
///   named_parameters(); a shared parameter under its first name.
/// @throws c10::ValueError if batch sizes differ or are zero, if the loss is more than one number,
///   if a layer (named) normalises with batch statistics, if the model draws random numbers, or if
///   `max_workspace_bytes` is below 1.
TORCHIUM_API torch::OrderedDict<std::string, at::Tensor> per_sample_gradients(
    const torch::nn::Module& model, const ForwardFunction& forward, const LossFunction& loss_fn,
    const at::Tensor& inputs, const at::Tensor& targets,
    int64_t max_workspace_bytes = int64_t{1} << 28);

/// With J the matrix of all per-sample gradients, one row per sample. Arguments, models, samples
/// taken one by one, and errors are those of per_sample_gradients(). Also raises c10::ValueError if
/// no parameter requires a gradient, or another argument has a wrong value.
namespace gradients {

using torchium::per_sample_gradients;

/// The l2 norm of each sample's gradient, over all trainable parameters.
///
/// The gradients are not formed where a layer has one position per sample (`|a|^2 |g|^2` for an
/// input a and an output gradient g), or few: for T positions with `2 T^2 < in out`, the sum over
/// positions t and s of `(a_t . a_s) (g_t . g_s)`. Otherwise they are formed for some samples at a
/// time.
///
/// @param max_workspace_bytes bounds the gradients that exist at a time, of at least one sample.
///   Inputs and output gradients of the layers, for the whole batch, are not counted.
/// @return [batch]; float64 if a parameter is, otherwise float32.
TORCHIUM_API at::Tensor per_sample_norms(const torch::nn::Module& model,
                                         const ForwardFunction& forward,
                                         const LossFunction& loss_fn, const at::Tensor& inputs,
                                         const at::Tensor& targets,
                                         int64_t max_workspace_bytes = int64_t{1} << 28);

/// The inner products of the samples' gradients, `J J^T`, layer by layer without J. If the samples
/// are taken one by one, J is formed in float64, some rows at a time. Sums are float64; Hopper GPUs
/// add up those of convolutions and sequences in float32.
///
/// @param max_workspace_bytes bounds these rows, of at least one sample. If it is too small for
///   all, gradients are computed several times. The workspace of layers that do not need them is at
///   most 100 MB, on a GPU 1 GB.
/// @return [batch, batch], float64, symmetric.
TORCHIUM_API at::Tensor gram(const torch::nn::Module& model, const ForwardFunction& forward,
                             const LossFunction& loss_fn, const at::Tensor& inputs,
                             const at::Tensor& targets,
                             int64_t max_workspace_bytes = int64_t{1} << 28);

/// The inner product of each sample's gradient with given vectors, `J v`: the derivative of the
/// sample's loss in the direction v.
///
/// @param vectors name -> tensor of the parameter's shape, for each trainable parameter.
/// @param max_workspace_bytes bounds the gradients that exist at a time, of at least one sample,
///   for models that need explicit gradients. At present there is never more than one.
/// @return [batch]; float64 if a parameter is, otherwise float32.
TORCHIUM_API at::Tensor jvp_dots(const torch::nn::Module& model, const ForwardFunction& forward,
                                 const LossFunction& loss_fn, const at::Tensor& inputs,
                                 const at::Tensor& targets,
                                 const torch::OrderedDict<std::string, at::Tensor>& vectors,
                                 int64_t max_workspace_bytes = int64_t{1} << 28);

/// Adds the sum of the clipped gradients of all samples to `.grad`, and returns the norms.
///
/// `p.grad += sum_i min(1, max_norm / |g_i|) g_i`, with the norm over all trainable parameters. It
/// is the sum, not the mean, so that calls for parts of a large batch add up. Every trainable
/// parameter gets a `.grad`, zero if no sample reaches it, because the noise of differentially
/// private training belongs to all of them; also of an empty batch. A gradient that is not finite
/// makes the sum NaN. If an exception is thrown, no `.grad` has changed.
///
/// @param max_norm the largest norm of a sample's gradient in the sum.
/// @param max_workspace_bytes as for per_sample_norms().
/// @return the norms before clipping, [batch]; float64 if a parameter is, otherwise float32.
TORCHIUM_API at::Tensor clip_and_accumulate(const torch::nn::Module& model,
                                            const ForwardFunction& forward,
                                            const LossFunction& loss_fn, const at::Tensor& inputs,
                                            const at::Tensor& targets, double max_norm,
                                            int64_t max_workspace_bytes = int64_t{1} << 28);

/// The gradients of single samples from ordinary backward passes, while it exists.
///
///     torchium::gradients::PerSample scope(*model);
///     auto loss = torch::nn::functional::cross_entropy(model->forward(inputs), targets);
///     loss.backward();
///     scope.grad_sample("0.weight");  // [batch, out, in]
///
/// Row i is the gradient of sample i's loss. Forward and backward passes are those of the program:
/// any inputs, any loss, dropout, autocast. `.grad` is written as always. Several backward passes
/// are more samples, in the order of the passes, unless they reach the same call, as with
/// retain_graph: then their gradients are added. zero_grad() discards those before it. Passes that
/// torch::autograd::grad() runs do not count. A parameter that is used several times has the sum
/// over its uses, and one that a pass has not reached zero rows there.
///
/// Takes the layers that per_sample_gradients() takes in one pass, those of register_layer() among
/// them, and self-attention. Dimension 0 of the input of every layer must be the sample, dimension
/// 1 in the attention and transformer layers of torch::nn. per_sample_gradients() needs no such
/// agreement, and checks it; here only the sizes are compared. A model that has time in dimension
/// 0, sorts its samples, or mixes them other than by batch normalisation gets wrong rows without an
/// error. Calls of a layer in one backward pass are positions of the same samples: a batch that
/// goes through the model in parts needs a backward pass for each part.
///
/// Inputs and output gradients of the layers are kept until it is destroyed. Backward passes must
/// have ended when rows are read.
class TORCHIUM_API PerSample {
 public:
  /// @param model owns the parameters, and must outlive this object; frozen ones are left out.
  /// @param reduction "mean" if the loss is the mean over the samples of a backward pass, "sum" if
  ///   it is the sum.
  /// @throws c10::ValueError for a layer (named) that is not supported, or normalises with the
  ///   statistics of the batch; if no parameter requires a gradient; for another `reduction`.
  explicit PerSample(const torch::nn::Module& model, const std::string& reduction = "mean");
  ~PerSample();
  PerSample(const PerSample&) = delete;
  PerSample& operator=(const PerSample&) = delete;

  /// The rows of all passes so far, computed once after each backward pass.
  ///
  /// @return name -> [samples, shape of the parameter...], in the parameter's dtype and the order
  ///   of named_parameters(); a shared parameter under its first name.
  /// @throws c10::ValueError if no backward pass has reached a parameter, if a parameter (named)
  ///   was also used outside of its layer or has become trainable, after a normalisation with batch
  ///   statistics, if layers (named) have seen different numbers of samples, or if the input of a
  ///   layer was changed in place after its backward pass.
  const torch::OrderedDict<std::string, at::Tensor>& grad_samples();
  /// Those of one parameter. @throws c10::ValueError also if there is none of this name.
  at::Tensor grad_sample(const std::string& name);
  /// The same for the parameter itself.
  at::Tensor grad_sample(const at::Tensor& param);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradients
}  // namespace torchium
