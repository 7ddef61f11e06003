#include "optim/kfac_direction.h"

#include <ATen/ATen.h>

namespace torchium::optim::detail {
namespace {

// V [groups, o/groups, a] in two parts, so that weight and bias need not be packed.
struct SplitMatrix {
  at::Tensor weight;  // [groups, o/groups, c]
  at::Tensor bias;    // [groups, o/groups, 1]; undefined: zero
};

SplitMatrix split_matrix(const LayerTensors& V, int64_t groups) {
  const int64_t rows = V.weight.size(0) / groups;
  SplitMatrix result{V.weight.reshape({groups, rows, -1}), {}};
  if (V.bias.defined()) {
    result.bias = V.bias.reshape({groups, rows, 1});
  }
  return result;
}

// L V, [groups, o/groups, columns].
at::Tensor multiply_left(const at::Tensor& L, const SplitMatrix& V, int64_t columns) {
  const int64_t c = V.weight.size(-1);
  if (columns == c) {
    return at::bmm(L, V.weight);
  }
  at::Tensor product = at::empty({L.size(0), L.size(1), columns}, L.options());
  at::Tensor weight = product.narrow(-1, 0, c);
  at::Tensor bias = product.narrow(-1, c, 1);
  at::bmm_out(weight, L, V.weight);
  if (V.bias.defined()) {
    at::bmm_out(bias, L, V.bias);
  } else {
    bias.zero_();
  }
  return product;
}

// X R in the two parts and shapes of V.
LayerTensors multiply_right(const at::Tensor& X, const at::Tensor& R, const LayerTensors& V) {
  const int64_t c = V.weight.numel() / V.weight.size(0);
  LayerTensors result{at::bmm(X, R.narrow(-1, 0, c)).view(V.weight.sizes()), {}};
  if (V.bias.defined()) {
    result.bias = at::bmm(X, R.narrow(-1, c, 1)).view(V.bias.sizes());
  }
  return result;
}

// lambda_G lambda_A^T + damping; 1 for a group without eigenvalues yet.
at::Tensor damped_eigenvalues(const KfacLayer& layer) {
  const at::Tensor lambda_G = layer.G_eigenvalues.unsqueeze(-1);
  const at::Tensor damped =
      at::mul(lambda_G, layer.A_eigenvalues.unsqueeze(-2)).add_(layer.damping);
  const at::Tensor none = lambda_G.lt(0);
  if (none.is_cpu() && !none.any().item<bool>()) {
    return damped;
  }
  return at::where(none, at::ones({}, damped.options()), damped);
}

}  // namespace

LayerTensors kfac_direction(const KfacLayer& layer, DampingSplit split, const LayerTensors& V) {
  const SplitMatrix matrix = split_matrix(V, layer.A.size(0));
  const int64_t columns = layer.A.size(-1);
  if (split != DampingSplit::kExact) {
    return multiply_right(multiply_left(layer.G_root, matrix, columns), layer.A_root, V);
  }
  const at::Tensor& Q_A = layer.A_root;
  const at::Tensor& Q_G = layer.G_root;
  at::Tensor rotated = at::bmm(multiply_left(Q_G.mT(), matrix, columns), Q_A);
  rotated.div_(damped_eigenvalues(layer));
  return multiply_right(at::bmm(Q_G, rotated), Q_A.mT(), V);
}

}  // namespace torchium::optim::detail
