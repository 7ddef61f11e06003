// Gradients of single samples.
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

/// The gradient of the loss of every single sample, for every trainable parameter.
///
/// Row i of an entry is the gradient of `loss_fn(forward(inputs[i:i+1]), targets[i:i+1])`, so that
/// the mean of the rows is the gradient of a mean loss. `forward` is called on the whole batch and
/// on one sample. Pure: no gradient, parameter, buffer or random state changes; also within a
/// NoGradGuard.
///
///     auto gradients = torchium::per_sample_gradients(
///         *model, [&](const auto& x) { return model->forward(x); },
///         [](const auto& y, const auto& t) { return torch::nn::functional::cross_entropy(y, t); },
///         inputs, targets);
///     gradients["0.weight"];  // [batch, out, in]
///
/// @param model owns the parameters. Each must be used by the operators linear (addmm, matmul, mm),
///   conv2d, embedding, layer_norm or group_norm, whose input has the sample in dimension 0.
/// @param forward inputs [batch, ...] -> output [batch, ...].
/// @param loss_fn (output [1, ...], target [1, ...]) -> one number.
/// @param inputs, targets [batch, ...].
/// @return name -> [batch, shape of the parameter...], in the parameter's dtype and the order of
///   named_parameters(); a shared parameter under its first name.
/// @throws c10::ValueError for batch sizes that differ or are zero, a loss of more than one number,
///   a layer (named) that is not supported or whose output for a sample depends on others, and for
///   a model that draws random numbers.
TORCHIUM_API torch::OrderedDict<std::string, at::Tensor> per_sample_gradients(
    const torch::nn::Module& model, const ForwardFunction& forward, const LossFunction& loss_fn,
    const at::Tensor& inputs, const at::Tensor& targets);

}  // namespace torchium
