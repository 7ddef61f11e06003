#include "gradients/factors/eigenbasis_moments.h"

#include "gradients/jacobian/patches.h"
#include "support/phase.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace torchium::gradients::detail {
namespace {

bool is_identity(const at::Tensor& vectors) { return vectors.dim() == 2; }

// a [groups, n, T, c], with a 1 appended if the basis has a row for the bias.
at::Tensor extended(const at::Tensor& a, int64_t length) {
  if (a.size(-1) == length) {
    return a;
  }
  auto sizes = a.sizes().vec();
  sizes.back() = 1;
  return at::cat({a, at::ones(sizes, a.options())}, -1);
}

// X [groups, ..., n] U
at::Tensor rotated(const at::Tensor& X, const at::Tensor& U) {
  return is_identity(U) ? X : at::bmm(X.flatten(1, -2), U).view(X.sizes());
}

// For several positions it is cheaper to rotate the gradients of samples if there are fewer of them
// than vectors.
bool rotates_vectors(int64_t positions, int64_t o, int64_t a) {
  return positions * (a * a + o * o) <= o * a * (a + o);
}

// a [groups, n, T, a] and g [groups, n, T, o] of some samples with several positions.
void add_sums_of_positions_(at::Tensor& sum, const at::Tensor& a, const at::Tensor& g,
                            const Eigenbasis& basis) {
  const bool vectors_first = rotates_vectors(a.size(2), sum.size(1), sum.size(2));
  const int64_t most =
      std::max<int64_t>(1, max_patch_elements(a) / std::max<int64_t>(1, sum.numel()));
  for (int64_t first = 0; first < a.size(1); first += most) {
    const int64_t count = std::min(most, a.size(1) - first);
    const auto part = [&](const at::Tensor& vectors, const at::Tensor& U) {
      const at::Tensor some = vectors.narrow(1, first, count).contiguous();
      return vectors_first ? rotated(some, U) : some;
    };
    at::Tensor D = at::matmul(part(g, basis.G).mT(), part(a, basis.A));  // [groups, n, o, a]
    if (!vectors_first) {
      D = rotated(D, basis.A);
      D = is_identity(basis.G) ? D : at::matmul(basis.G.mT().unsqueeze(1), D);
    }
    sum.add_(D.square_().sum(1));
  }
}

void add_lookup_moments_(at::Tensor& sum, const LayerCall& call, const at::Tensor& U) {
  const at::Tensor indices = call.input.reshape(-1);
  const at::Tensor is_padding = indices.eq(call.settings[kPaddingIndex]);
  const at::Tensor h = call.output_gradient.reshape({indices.numel(), -1})
                           .to(sum.scalar_type())
                           .masked_fill(is_padding.unsqueeze(-1), 0);
  const int64_t width = h.size(1);
  if (is_identity(U)) {
    sum.select(0, 0).narrow(-1, 0, width).index_add_(0, indices, h.square());
  } else {
    const at::Tensor in_basis = at::mm(h, U.select(0, 0).narrow(0, 0, width));
    sum.select(0, 0).index_add_(0, indices, in_basis.square());
  }
}

}  // namespace

void add_eigenbasis_moments_(at::Tensor& sum, const LayerCall& call, at::IntArrayRef weight_shape,
                             const Eigenbasis& basis) {
  const torchium::detail::Phase phase("torchium::factors");
  const c10::NoGradGuard no_grad;
  if (call.input.numel() == 0) {
    return;
  }
  if (call.kind == LayerKind::kEmbedding) {
    add_lookup_moments_(sum, call, basis.A);
    return;
  }
  const LayerCall plain =
      is_transposed_convolution(call) ? with_plain_weight(call, weight_shape, 0) : call;
  const WeightGeometry weight = weight_geometry(plain, weight_shape, 0);
  const PositionSource source(plain, weight, sum.scalar_type());
  for (int64_t first = 0; first < source.samples(); first += source.piece()) {
    const int64_t count = std::min(source.piece(), source.samples() - first);
    const Positions positions = source.of_samples(first, count);
    const at::Tensor a = extended(positions.A, sum.size(-1));
    if (source.positions() > 1) {
      add_sums_of_positions_(sum, a, positions.G, basis);
      continue;
    }
    // (u v^T)^2 = u^2 (v^2)^T
    const at::Tensor u = rotated(positions.G.contiguous(), basis.G).flatten(1, 2).square();
    const at::Tensor v = rotated(a.contiguous(), basis.A).flatten(1, 2).square();
    sum.baddbmm_(u.mT(), v);
  }
}

}  // namespace torchium::gradients::detail
