// Options of update_curvature() of KFAC and NaturalGradient.
#pragma once

#include "torchium/export.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <optional>
#include <string>

namespace torchium::optim {

/// How a loss treats the outputs of the model; names and defaults are those of Python's
/// `torchium.KFAC.update_curvature()` and `torchium.NaturalGradient.update_curvature()`.
struct TORCHIUM_API CurvatureOptions {
  /// How the loss combines the elements of one sample (tokens, pixels, output units): "mean", as
  /// torch's losses by default, or "sum". Over samples it is a mean or a sum by
  /// KFACOptions::batch_averaged; natural gradient needs a mean.
  TORCH_ARG(std::string, reduction) = "mean";
  /// "cross_entropy": the dimension of the classes. Needed for outputs of more than two dimensions:
  /// -1 for [N, ..., C], 1 for torch's [N, C, ...].
  TORCH_ARG(std::optional<int64_t>, class_dim) = std::nullopt;
  /// Bool, the shape of the outputs (without the classes): false where the loss ignores an element.
  /// "mean" divides by the number of those that count.
  TORCH_ARG(at::Tensor, mask);
  /// fisher "mc": sampled targets for each element, and so backward passes, >= 1.
  TORCH_ARG(int64_t, samples) = 1;
  /// fisher "mc": of the samples; none: the default one of the device.
  TORCH_ARG(std::optional<at::Generator>, generator) = std::nullopt;
};

}  // namespace torchium::optim
