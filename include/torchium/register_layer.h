// Formulas for the per-sample gradients of layers of your own.
#pragma once

#include "torchium/export.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <string>
#include <typeinfo>
#include <utility>

namespace torchium::gradients {

/// Gradients of all samples by the name of the parameter in its layer, [samples, shape...].
using SampleRows = torch::OrderedDict<std::string, at::Tensor>;

/// The rows of the trainable parameters of a layer, from what it received and the gradient of the
/// sum of all losses by what it returned.
template <typename Layer>
using LayerFormula = std::function<SampleRows(const Layer& layer, const at::Tensor& input,
                                              const at::Tensor& output_gradient)>;

namespace detail {

TORCHIUM_API void register_formula(const std::type_info& type,
                                   LayerFormula<torch::nn::Module> formula);
TORCHIUM_API at::Tensor call_layer(const std::type_info& type, const torch::nn::Module& layer,
                                   const at::Tensor& input,
                                   const std::function<at::Tensor()>& forward);

}  // namespace detail

/// Gives the layers of a class a formula for their per-sample gradients, which
/// per_sample_gradients() and the other functions, and PerSample, use for layer_call() in its
/// forward. They run it, once for every two trainable parameters of a layer, under a NoGradGuard,
/// for the whole batch, whatever max_workspace_bytes is. A second formula for a class replaces the
/// first. K-FAC and natural gradient do not use it.
///
///     struct ScaleImpl : torch::nn::Module {
///       torch::Tensor forward(const torch::Tensor& x) {
///         return torchium::gradients::layer_call(*this, x, [&] { return factor * x; });
///       }
///       torch::Tensor factor = register_parameter("factor", torch::ones({64}));
///     };
///     torchium::gradients::register_layer<ScaleImpl>(
///         [](const ScaleImpl&, const auto& input, const auto& output_gradient) {
///           return torchium::gradients::SampleRows{{"factor", input * output_gradient}};
///         });
///
/// @param formula returns an entry [input.size(0), *shape] for each trainable parameter.
/// @throws c10::ValueError for a class of torch::nn, which calls no layer_call(), or without a
///   formula. Later, from the functions: an entry (named) is missing or has another shape.
template <typename Layer>
void register_layer(LayerFormula<Layer> formula) {
  LayerFormula<torch::nn::Module> erased;
  if (formula != nullptr) {
    erased = [formula = std::move(formula)](const torch::nn::Module& layer, const at::Tensor& input,
                                            const at::Tensor& output_gradient) {
      return formula(static_cast<const Layer&>(layer), input, output_gradient);
    };
  }
  detail::register_formula(typeid(Layer), std::move(erased));
}

/// Computes forward(), as one call of a layer if its class, the static type, has a formula:
/// libtorch has no hooks of modules that could see it. Without a formula it is forward() alone.
///
/// @param layer owns its parameters itself.
/// @param input, and the result of forward(): dimension 0 is the sample. forward() must not change
///   the input in place.
template <typename Layer>
at::Tensor layer_call(const Layer& layer, const at::Tensor& input,
                      const std::function<at::Tensor()>& forward) {
  return detail::call_layer(typeid(Layer), layer, input, forward);
}

}  // namespace torchium::gradients
