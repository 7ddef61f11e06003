// The gradients of the losses of single samples of a batch, for whatever is computed from them.
#pragma once

#include "gradients/jacobian/jacobian.h"
#include "torchium/gradients.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace torchium::gradients::detail {

// What is differentiated, by the trainable parameters.
class SampleLoss {
 public:
  // Raises ValueError for batches that do not fit, or hold fewer samples than `least`. The
  // arguments must outlive it.
  SampleLoss(const torch::nn::Module& model, const ForwardFunction& forward,
             const LossFunction& loss_fn, const at::Tensor& inputs, const at::Tensor& targets,
             int64_t least = 1);

  const torch::nn::Module& model() const { return model_; }
  int64_t samples() const { return inputs_.size(0); }
  const at::Tensor& inputs() const { return inputs_; }
  const at::Tensor& targets() const { return targets_; }

  at::Tensor forward(const at::Tensor& inputs) const;
  // Of one sample, as a batch of one: 0-dim.
  at::Tensor of(const at::Tensor& output, const at::Tensor& target) const;
  // Of each sample: [batch]. From one call of the loss function for the batch if that returns one
  // number per sample, the same for each half of the batch, or else from one call under vmap.
  at::Tensor of_each(const at::Tensor& output) const;

 private:
  // One number per sample from one call; undefined if the loss function returns something else.
  at::Tensor of_batch(const at::Tensor& output, const at::Tensor& targets) const;
  // Whether halves of the batch have other losses than these, as with weights by a maximum or a sum
  // over the batch.
  bool depend_on_the_batch(const at::Tensor& losses, const at::Tensor& output) const;
  // Undefined if the loss function is not made of operators that can be batched, for example
  // because it reads values.
  at::Tensor vmapped(const at::Tensor& output) const;

  const torch::nn::Module& model_;
  const ForwardFunction& forward_;
  const LossFunction& loss_fn_;
  at::Tensor inputs_;
  at::Tensor targets_;
};

// The parameters of a model that require a gradient, and their names.
struct TrainableParameters {
  explicit TrainableParameters(const torch::nn::Module& model);

  std::vector<at::Tensor> params;
  std::vector<std::string> names;
};

// Receives the gradients of sample i, undefined where the loss does not depend on the parameter.
using SampleReceiver = std::function<void(int64_t i, const std::vector<at::Tensor>& gradients)>;
// Computes the gradients of the samples from `first` to the last, again in each call, and hands
// them to a receiver.
using SampleVisit = std::function<void(int64_t first, const SampleReceiver& of_sample)>;

// Calls of_jacobian once if layer calls suffice, otherwise of_samples once, with a warning that
// names the public `function`. Does not call of_jacobian if no loss depends on a parameter, and
// neither for an empty batch. Leaves buffers and random numbers alone. Raises ValueError if a
// sample has no gradient of its own.
void evaluate(const char* function, const SampleLoss& loss, const TrainableParameters& trainable,
              const std::function<void(const Jacobian&)>& of_jacobian,
              const std::function<void(const SampleVisit&)>& of_samples);
// The same with one visit of all samples.
void evaluate(const char* function, const SampleLoss& loss, const TrainableParameters& trainable,
              const std::function<void(const Jacobian&)>& of_jacobian,
              const SampleReceiver& of_sample);

}  // namespace torchium::gradients::detail
