// Per-sample gradients.
#pragma once

#include "torchium/export.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <functional>
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
/// conv2d, embedding, layer_norm or group_norm, with the sample in dimension 0 of the input. This
/// is checked: each row must depend only on its own sample's loss, the first sample must give the
/// same values when alone in the batch, and all samples the same when the batch is rolled by one.
/// All other models (recurrent layers, attention, time in dimension 0, positions that samples
/// share) need one pass per sample, which is slow for a batch; a warning gives the reason.
/// Parameter hooks run in that case, as in torch::autograd::grad().
///
///     auto gradients = torchium::per_sample_gradients(
///         *model, [&](const auto& x) { return model->forward(x); },
///         [](const auto& y, const auto& t) { return torch::nn::functional::cross_entropy(y, t); },
///         inputs, targets);
///     gradients["0.weight"];  // [batch, out, in]
///
/// @param model owns the parameters; frozen ones are left out.
/// @param forward inputs [batch, ...] -> output [batch, ...]; called on batches of one too.
/// @param loss_fn (output [1, ...], target [1, ...]) -> one number.
/// @param inputs, targets [batch, ...].
/// @return name -> [batch, shape of the parameter...], in the parameter's dtype and the order of
///   named_parameters(); a shared parameter under its first name.
/// @throws c10::ValueError if batch sizes differ or are zero, if the loss is more than one number,
///   if a layer (named) normalises with batch statistics, or if the model draws random numbers.
TORCHIUM_API torch::OrderedDict<std::string, at::Tensor> per_sample_gradients(
    const torch::nn::Module& model, const ForwardFunction& forward, const LossFunction& loss_fn,
    const at::Tensor& inputs, const at::Tensor& targets);

}  // namespace torchium
