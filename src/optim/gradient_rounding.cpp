#include "optim/gradient_rounding.h"

#include <ATen/Context.h>

#include <algorithm>
#include <limits>

namespace torchium::optim::detail {
namespace {

using gradients::detail::LayerKind;
using gradients::detail::LayerUse;

constexpr double kTf32Epsilon = 1.0 / 1024;

// Of a sum of products in this dtype. In 16 bits the rounding of the result is most of it, in more
// that of the sum.
double rounding_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 1e-12;
    case at::kHalf:
      return 2.0 * std::numeric_limits<at::Half>::epsilon();
    case at::kBFloat16:
      return 2.0 * std::numeric_limits<at::BFloat16>::epsilon();
    default:
      return 1e-5;
  }
}

bool computes_in_tf32(const LayerUse& use) {
  if (!use.output_gradient.is_cuda() ||
      (use.kind != LayerKind::kLinear && use.kind != LayerKind::kConv2d)) {
    return false;
  }
  const auto op = use.kind == LayerKind::kConv2d ? at::Float32Op::CONV : at::Float32Op::MATMUL;
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, op) ==
         at::Float32Precision::TF32;
}

double rounding_of(const LayerUse& use) {
  double rounding = rounding_of(use.output_gradient.scalar_type());
  if (at::isFloatingType(use.input.scalar_type())) {  // else the indices of an embedding
    rounding = std::max(rounding, rounding_of(use.input.scalar_type()));
  }
  if (rounding < kTf32Epsilon && use.output_gradient.scalar_type() == at::kFloat &&
      computes_in_tf32(use)) {
    return 2.0 * kTf32Epsilon;
  }
  return rounding;
}

}  // namespace

std::vector<double> gradient_roundings(at::TensorList grads, const std::vector<LayerUse>& uses) {
  std::vector<double> roundings;
  for (const auto& grad : grads) {
    roundings.push_back(rounding_of(grad.scalar_type()));
  }
  for (const auto& use : uses) {
    for (const int64_t p : {use.weight, use.bias}) {
      if (p >= 0) {
        roundings[p] = std::max(roundings[p], rounding_of(use));
      }
    }
  }
  return roundings;
}

}  // namespace torchium::optim::detail
