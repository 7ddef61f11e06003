#include "gradients/per_sample/sample_checks.h"

#include "linalg/common/precision.h"

#include <ATen/ATen.h>

#include <cmath>
#include <map>

namespace torchium::gradients::detail {
namespace {

// Whether both lists hold the same layer calls, and `agree` is true for every pair.
template <typename Agree>
bool all_agree(const std::vector<LayerCall>& calls, const std::vector<LayerCall>& others,
               Agree&& agree) {
  bool result = calls.size() == others.size();
  for (size_t i = 0; result && i < calls.size(); ++i) {
    result = calls[i].kind == others[i].kind && calls[i].weight == others[i].weight &&
             calls[i].bias == others[i].bias && agree(calls[i], others[i]);
  }
  return result;
}

// An undefined gradient is zero.
bool gradients_agree(const at::Tensor& found, const at::Tensor& expected) {
  if (!found.defined() || !expected.defined()) {
    return found.defined() == expected.defined();
  }
  return rows_agree(found, expected);
}

}  // namespace

at::Tensor sample_factors(int64_t samples, const at::TensorOptions& options) {
  // Fractions of multiples of the golden ratio: neighbours and periods fall far apart.
  constexpr double golden = 0.61803398874989485;
  constexpr double octaves = 12;
  const at::Tensor steps = at::arange(1, samples + 1, options.dtype(at::kDouble)) * golden;
  const at::Tensor exponents = ((steps - steps.floor()) * octaves).floor() - octaves / 2;
  return at::exp2(exponents).to(options);
}

bool rows_agree(const at::Tensor& rows, const at::Tensor& expected) {
  if (rows.sizes() != expected.sizes() || rows.scalar_type() != expected.scalar_type()) {
    return false;
  }
  if (!rows.is_floating_point() || rows.numel() == 0) {
    return at::equal(rows, expected);
  }
  // Each row has its own scale: samples with a small loss have small gradients.
  const at::Tensor a = rows.reshape({rows.size(0), -1}).to(at::kDouble);
  const at::Tensor b = expected.reshape({expected.size(0), -1}).to(at::kDouble);
  const at::Tensor scale = at::maximum(a.abs().amax(1), b.abs().amax(1));
  const double tolerance = std::sqrt(linalg::detail::epsilon_of(rows.scalar_type()));
  return ((a - b).abs().amax(1) <= tolerance * scale).all().item<bool>();
}

bool are_scaled(const std::vector<LayerCall>& calls, const std::vector<LayerCall>& scaled,
                const at::Tensor& factors) {
  return all_agree(calls, scaled, [&](const LayerCall& call, const LayerCall& other) {
    const at::Tensor& gradient = call.output_gradient;
    if (!gradient.defined()) {
      return !other.output_gradient.defined();
    }
    std::vector<int64_t> shape(gradient.dim(), 1);
    shape[0] = -1;
    return gradients_agree(other.output_gradient,
                           gradient * factors.reshape(shape).to(gradient.scalar_type()));
  });
}

bool begin_with(const std::vector<LayerCall>& calls, const std::vector<LayerCall>& of_first) {
  return all_agree(calls, of_first, [](const LayerCall& call, const LayerCall& first) {
    const at::Tensor& gradient = call.output_gradient;
    return rows_agree(first.input, call.input.narrow(0, 0, 1)) &&
           gradients_agree(first.output_gradient,
                           gradient.defined() ? gradient.narrow(0, 0, 1) : gradient);
  });
}

bool are_rolled(const std::vector<LayerCall>& calls, const std::vector<LayerCall>& rolled) {
  return all_agree(calls, rolled, [](const LayerCall& call, const LayerCall& other) {
    return rows_agree(other.input, call.input.roll(1, 0));
  });
}

void check_samples(const std::vector<LayerCall>& calls,
                   const std::function<std::string(int64_t)>& name_of_param) {
  const auto name = [&](const LayerCall& call) {
    return "the layer of " + name_of_param(call.weight >= 0 ? call.weight : call.bias);
  };
  struct Pass {
    const LayerCall* first = nullptr;
    const LayerCall* positions = nullptr;  // an embedding of a vector of indices
    const LayerCall* tokens = nullptr;     // one of a matrix with as many columns
  };
  std::map<int64_t, Pass> passes;
  for (const LayerCall& call : calls) {
    Pass& pass = passes[call.micro_batch];
    pass.first = pass.first == nullptr ? &call : pass.first;
    const auto count = samples_of(*pass.first);
    const auto samples = samples_of(call);
    TORCH_CHECK_VALUE(samples == count, name(*pass.first), " has seen ", count,
                      " samples in dimension 0 of its input, ", name(call), " ", samples,
                      "; dimension 0 must be the sample in all layers (expand positions to "
                      "[batch, ...])");
    if (call.kind == LayerKind::kEmbedding && call.input.dim() == 1) {
      pass.positions = &call;
    } else if (call.kind == LayerKind::kEmbedding && call.input.dim() > 1 &&
               call.input.size(1) == count) {
      pass.tokens = &call;
    }
    TORCH_CHECK_VALUE(pass.positions == nullptr || pass.tokens == nullptr, name(*pass.positions),
                      " has looked up ", count,
                      " indices, which may be samples or positions: ", name(*pass.tokens),
                      " has seen ", pass.tokens->input.sizes(), "; expand positions to that shape");
  }
}

}  // namespace torchium::gradients::detail
