#include "gradients/factors/kronecker_factors.h"

#include "gradients/factors/device_factors.h"
#include "gradients/factors/patch_moments.h"
#include "gradients/jacobian/patches.h"
#include "linalg/products/structured_matrix.h"
#include "linalg/products/symmetric_update.h"
#include "linalg/products/toeplitz.h"
#include "support/phase.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace torchium::gradients::detail {
namespace {

void check_factor(const at::Tensor& factor, const char* name, int64_t groups, int64_t order,
                  bool with_bias, const at::Tensor& input, bool is_structured) {
  const auto sizes = factor.sym_sizes();
  const bool fits = (sizes.size() == 3 || sizes.size() == 2) && sizes[0] == groups &&
                    (is_structured || sizes[1] == sizes.back()) &&
                    (sizes[1] == order || (with_bias && sizes[1] == order + 1));
  TORCH_CHECK_VALUE(fits, name, " has shape ", sizes, "; it must be [", groups, ", ", order, ", ",
                    order, "] or its diagonal [", groups, ", ", order, "]",
                    with_bias ? ", or one row and column more for a bias" : "");
  TORCH_CHECK_VALUE(factor.scalar_type() == at::kFloat || factor.scalar_type() == at::kDouble, name,
                    " has dtype ", factor.scalar_type(), "; it must be float32 or float64");
  TORCH_CHECK_VALUE(factor.is_contiguous() && factor.device() == input.device(), name,
                    " must be contiguous and on ", input.device(), ", like the input");
}

// The diagonal of the sums of second_moment_(), [groups, vector].
void squares_(at::Tensor& sum, const at::Tensor& X, bool accumulate) {
  if (!accumulate) {
    sum.zero_();
  }
  sum.narrow(1, 0, X.size(1)).add_(X.to(sum.scalar_type()).square().sum(2));
  if (sum.size(1) > X.size(1)) {
    sum.select(1, X.size(1)).add_(X.size(2));
  }
}

// The order of the elements in the vectors of a product.
struct VectorOrder {
  int64_t length;      // elements beyond are zero
  int64_t pixels = 1;  // of a patch whose channels lie side by side (device_factors.h)
};

// X: [groups, vector, count]. Returns it in the order of the weight.
at::Tensor in_order_of_weight(const at::Tensor& X, const VectorOrder& order) {
  const at::Tensor vectors = X.narrow(1, 0, order.length);
  return order.pixels == 1 ? vectors
                           : vectors.unflatten(1, {order.pixels, -1}).transpose(1, 2).flatten(1, 2);
}

bool is_compact(const at::Tensor& sum) { return sum.dim() == 3 && sum.size(2) != sum.size(1); }

// second_moment_() of a block-diagonal or Toeplitz sum. M: K or C of StructuredSums.
void compact_moment_(at::Tensor& sum, const at::Tensor& X, const at::Tensor& M, bool accumulate) {
  const int64_t n = sum.size(1);
  at::Tensor vectors = X.to(sum.scalar_type());
  if (n > X.size(1)) {
    vectors = at::cat({vectors, at::ones({X.size(0), 1, X.size(2)}, vectors.options())}, 1);
  }
  const at::Tensor moment =
      linalg::detail::structured_moment(vectors, sum.sizes(), M.defined() ? M.narrow(1, 0, n) : M);
  accumulate ? sum.add_(moment) : sum.copy_(moment);
}

// sum[g] <- X[g] X[g]^T, plus sum[g] to accumulate, with X: [groups, vector, count], each vector
// extended by a 1 if `sum` has room for it. M: K or C of StructuredSums.
void second_moment_(at::Tensor& sum, const at::Tensor& vectors, const VectorOrder& order,
                    bool accumulate, const at::Tensor& M) {
  if (is_compact(sum)) {
    compact_moment_(sum, in_order_of_weight(vectors, order), M, accumulate);
    return;
  }
  if (has_moment_kernel(sum, vectors)) {
    store_moment(sum, vectors, order.length, order.pixels, accumulate);
    return;
  }
  const at::Tensor X = in_order_of_weight(vectors, order);
  if (sum.dim() == 2) {
    squares_(sum, X, accumulate);
    return;
  }
  const int64_t length = X.size(1);
  const double beta = accumulate ? 1.0 : 0.0;
  at::Tensor inner = sum.narrow(1, 0, length).narrow(2, 0, length);
  linalg::detail::symmetric_update_(inner, X, beta, 1.0);
  if (sum.size(1) > length) {
    at::Tensor row = sum.select(1, length).narrow(1, 0, length);
    at::Tensor corner = sum.select(1, length).select(1, length);
    if (!accumulate) {
      row.zero_();
      corner.zero_();
    }
    row.add_(X.sum(2, /*keepdim=*/false, sum.scalar_type()));
    sum.select(2, length).narrow(1, 0, length).copy_(row);
    corner.add_(X.size(2));
  }
}

void check_lookup_factors(const at::Tensor& A_sum, const at::Tensor& counts, const LayerCall& call,
                          at::IntArrayRef weight_shape, bool is_structured) {
  const auto& gradient = call.output_gradient;
  TORCH_CHECK_VALUE(weight_shape.size() == 2 && gradient.sym_size(-1) == weight_shape[1] &&
                        gradient.sym_sizes().slice(0, gradient.dim() - 1) == call.input.sym_sizes(),
                    "an embedding with a weight of shape ", weight_shape, " got indices of shape ",
                    call.input.sym_sizes(), " and output_gradients of shape ", gradient.sym_sizes(),
                    "; they must be [...] and [..., width]");
  check_factor(A_sum, "A_sum", 1, weight_shape[1], /*with_bias=*/false, call.input, is_structured);
  check_factor(counts, "G_sum", 1, weight_shape[0], /*with_bias=*/false, call.input, is_structured);
  TORCH_CHECK_VALUE(counts.dim() == 2, "G_sum of an embedding is a diagonal, [1, ", weight_shape[0],
                    "], got shape ", counts.sym_sizes());
}

void update_lookup_factors_(at::Tensor& A_sum, at::Tensor& counts, const LayerCall& call,
                            bool accumulate, UpdatedFactors updated, const at::Tensor& K) {
  const at::Tensor indices = call.input.reshape(-1);
  const at::Tensor is_padding = indices.eq(call.settings[kPaddingIndex]);  // -1 is no index
  if (updated == UpdatedFactors::kBoth) {
    if (!accumulate) {
      counts.zero_();
    }
    counts.select(0, 0).index_add_(0, indices, is_padding.logical_not().to(counts.scalar_type()));
  }
  const at::Tensor h = call.output_gradient.reshape({1, indices.numel(), -1})
                           .to(A_sum.scalar_type())
                           .masked_fill(is_padding.unsqueeze(-1), 0);
  second_moment_(A_sum, h.mT(), {h.size(-1)}, accumulate, K);
}

// A call of with_plain_weight(), and what is added of it.
struct PlainCall {
  LayerCall call;
  // Of a transposed convolution: the vectors A are those of output gradients, and G of inputs.
  bool is_exchanged;
  bool adds_A, adds_G;
};

PlainCall plain_call(const LayerCall& call, at::IntArrayRef weight_shape, UpdatedFactors updated) {
  const bool both = updated == UpdatedFactors::kBoth;
  PlainCall result{call, is_transposed_convolution(call), both, /*adds_G=*/true};
  if (result.is_exchanged) {
    result.call = with_plain_weight(call, weight_shape, 0);
    result.adds_A = true;
    result.adds_G = both;
    if (call.input.is_cuda()) {  // operands_of(): the output gradient decides
      at::Tensor& input = result.call.output_gradient;
      input = input.to(call.output_gradient.scalar_type());
    }
  }
  return result;
}

// One position per sample: the mean of the inputs and the sum of the output gradients.
Positions reduced(const Positions& positions, bool is_exchanged, at::ScalarType dtype) {
  const auto of = [&](const at::Tensor& vectors, bool is_input) {
    return !vectors.defined() ? vectors
           : is_input         ? vectors.mean(2, /*keepdim=*/true, dtype)
                              : vectors.sum(2, /*keepdim=*/true, dtype);
  };
  return {of(positions.A, !is_exchanged), of(positions.G, is_exchanged)};
}

// Adds the moments of all positions of a call. Source: PositionSource or DevicePositions.
template <typename Source>
void update_factors_(at::Tensor& A_sum, at::Tensor& G_sum, const Source& source,
                     const PlainCall& plain, const VectorOrder& order, bool accumulate,
                     WeightSharing sharing, const StructuredSums& structured) {
  for (int64_t first = 0; first < source.samples(); first += source.piece()) {
    const int64_t count = std::min(source.piece(), source.samples() - first);
    const Positions all = source.of_samples(first, count);
    const auto [A, G] = sharing == WeightSharing::kReduce && source.positions() > 1
                            ? reduced(all, plain.is_exchanged, A_sum.scalar_type())
                            : all;
    if (A.defined()) {
      second_moment_(A_sum, A.flatten(1, 2).mT(), order, accumulate || first > 0, structured.K);
    }
    if (plain.adds_G) {
      second_moment_(G_sum, G.flatten(1, 2).mT(), {G.size(-1)}, accumulate || first > 0,
                     structured.C);
    }
  }
}

// 0 for a denominator of 0.
at::Tensor ratio(const at::Tensor& numerator, const at::Tensor& denominator) {
  return at::where(denominator.eq(0), at::zeros_like(numerator), numerator / denominator);
}

}  // namespace

void check_kronecker_factors(const at::Tensor& A_sum, const at::Tensor& G_sum,
                             const LayerCall& call, at::IntArrayRef weight_shape,
                             bool is_structured) {
  check_call_tensors(call, 0);
  if (call.kind == LayerKind::kEmbedding) {
    check_lookup_factors(A_sum, G_sum, call, weight_shape, is_structured);
  } else {
    const WeightGeometry weight = weight_geometry(call, weight_shape, 0);
    check_factor(A_sum, "A_sum", weight.groups, weight.fan_in,
                 /*with_bias=*/!is_transposed_convolution(call), call.input, is_structured);
    check_factor(G_sum, "G_sum", weight.groups, weight.fan_out, /*with_bias=*/false, call.input,
                 is_structured);
  }
  TORCH_CHECK_VALUE(A_sum.scalar_type() == G_sum.scalar_type(), "A_sum has dtype ",
                    A_sum.scalar_type(), " and G_sum ", G_sum.scalar_type(),
                    "; they must have the same");
}

void update_kronecker_factors_(at::Tensor& A_sum, at::Tensor& G_sum, const LayerCall& call,
                               at::IntArrayRef weight_shape, bool accumulate, WeightSharing sharing,
                               UpdatedFactors updated, const StructuredSums* structured) {
  const torchium::detail::Phase phase("torchium::factors");
  c10::NoGradGuard no_grad;
  check_kronecker_factors(A_sum, G_sum, call, weight_shape, structured != nullptr);
  const StructuredSums bases = structured == nullptr ? StructuredSums() : *structured;
  if (call.input.numel() == 0) {
    if (!accumulate) {
      A_sum.zero_();
      G_sum.zero_();
    }
    return;
  }
  if (call.kind == LayerKind::kEmbedding) {
    update_lookup_factors_(A_sum, G_sum, call, accumulate, updated, bases.K);
    return;
  }
  const PlainCall plain = plain_call(call, weight_shape, updated);
  const WeightGeometry weight = weight_geometry(plain.call, weight_shape, 0);
  const at::ScalarType dtype = A_sum.scalar_type();
  if (has_device_positions(plain.call, weight, dtype)) {
    const bool has_A = plain.adds_A && sharing == WeightSharing::kExpand &&
                       store_patch_moment(A_sum, plain.call, weight, accumulate);
    const DevicePositions source(plain.call, weight, /*with_inputs=*/plain.adds_A && !has_A);
    update_factors_(A_sum, G_sum, source, plain, {weight.fan_in, source.pixels()}, accumulate,
                    sharing, bases);
    return;
  }
  const PositionSource source(plain.call, weight, dtype, /*keeps_16_bits=*/dtype == at::kFloat,
                              /*with_inputs=*/plain.adds_A);
  update_factors_(A_sum, G_sum, source, plain, {weight.fan_in}, accumulate, sharing, bases);
}

void add_lookup_factors_(at::Tensor& A_sum, at::Tensor& G_sum, int64_t rows,
                         const at::Tensor& lookup_A_sum, const at::Tensor& counts) {
  c10::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(rows > 0 && lookup_A_sum.size(-1) <= A_sum.size(-1) && counts.dim() == 2 &&
                        counts.size(-1) == G_sum.size(-1),
                    "lookup_A_sum ", lookup_A_sum.sizes(), " and counts ", counts.sizes(),
                    " do not fit A_sum ", A_sum.sizes(), " and G_sum ", G_sum.sizes(), " of ", rows,
                    " rows");
  using linalg::detail::structured_diagonal;
  const auto trace = [](const at::Tensor& factor) {
    return structured_diagonal(factor).sum(at::kDouble);
  };
  const at::Tensor A_trace = trace(A_sum) / rows;
  const at::Tensor G_trace = trace(G_sum);
  const at::Tensor h_trace = trace(lookup_A_sum);
  const at::Tensor looked_up = trace(counts);
  const at::Tensor total = A_trace * G_trace + h_trace;  // G2 = counts / looked_up has trace 1
  const at::Tensor root = h_trace.sqrt();
  const at::Tensor share = ratio(root, root + (A_trace * G_trace).sqrt());  // r2 / (r1 + r2)
  const at::Tensor kept_trace = at::where(A_trace.eq(0), at::ones_like(A_trace), A_trace);
  // factor[:, :n] <- by factor[:, :n] + added_by added; the rest is multiplied by `by`
  const auto combine = [](at::Tensor& factor, const at::Tensor& by, at::Tensor added,
                          const at::Tensor& added_by) {
    factor.mul_(by.to(factor.scalar_type()));
    at::Tensor target = factor;
    if (added.dim() == 2 && factor.dim() == 3) {
      target = factor.diagonal(0, -2, -1);
    } else if (factor.dim() == 2) {
      added = structured_diagonal(added);
    } else if (linalg::detail::structure_of(factor) == linalg::detail::Structure::kToeplitz) {
      added = linalg::detail::toeplitz_padded(added, factor.size(1));
    }
    for (int64_t i = 1; i < target.dim(); ++i) {  // a bias comes last, and is not looked up
      target = target.narrow(i, 0, added.size(i));
    }
    target.add_(added * added_by.to(factor.scalar_type()));
  };
  combine(A_sum, 1 - share, lookup_A_sum, share * ratio(kept_trace * rows, h_trace));
  combine(G_sum, (1 - share) * ratio(total / kept_trace, G_trace), counts,
          share * ratio(total / kept_trace, looked_up));
}

}  // namespace torchium::gradients::detail
