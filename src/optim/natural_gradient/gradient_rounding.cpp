#include "optim/natural_gradient/gradient_rounding.h"

#include "linalg/common/precision.h"

#include <ATen/Context.h>

#include <algorithm>

namespace torchium::optim::detail {
namespace {

using gradients::detail::LayerCall;

constexpr double kTf32Epsilon = 1.0 / 1024;

// Of a sum of products in this dtype. In 16 bits the rounding of the result is most of it, in more
// that of the sum.
double rounding_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 1e-12;
    case at::kHalf:
    case at::kBFloat16:
      return 2.0 * linalg::detail::epsilon_of(dtype);
    default:
      return 1e-5;
  }
}

bool computes_in_tf32(const LayerCall& call) {
  if (!call.output_gradient.is_cuda() || !is_product(call)) {
    return false;
  }
  const auto op = is_convolution(call) ? at::Float32Op::CONV : at::Float32Op::MATMUL;
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, op) ==
         at::Float32Precision::TF32;
}

double rounding_of(const LayerCall& call) {
  double rounding = rounding_of(call.output_gradient.scalar_type());
  if (at::isFloatingType(call.input.scalar_type())) {  // else the indices of an embedding
    rounding = std::max(rounding, rounding_of(call.input.scalar_type()));
  }
  if (rounding < kTf32Epsilon && call.output_gradient.scalar_type() == at::kFloat &&
      computes_in_tf32(call)) {
    return 2.0 * kTf32Epsilon;
  }
  return rounding;
}

}  // namespace

std::vector<double> gradient_roundings(at::TensorList grads, const std::vector<LayerCall>& calls) {
  std::vector<double> roundings;
  for (const auto& grad : grads) {
    roundings.push_back(rounding_of(grad.scalar_type()));
  }
  for (const auto& call : calls) {
    for (const int64_t p : {call.weight, call.bias}) {
      if (p >= 0) {
        roundings[p] = std::max(roundings[p], rounding_of(call));
      }
    }
  }
  return roundings;
}

}  // namespace torchium::optim::detail
