#include "optim/kfac/kfac_direction.h"

#include "optim/kfac/factors/inverse_free.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>

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

// product <- L V, with L [groups, n, n] or its diagonal [groups, n].
void multiply_left_out(at::Tensor product, const at::Tensor& L, const at::Tensor& V) {
  if (L.dim() == 2) {
    at::mul_out(product, L.unsqueeze(-1), V);
  } else {
    at::bmm_out(product, L, V);
  }
}

// L V, [groups, o/groups, columns].
at::Tensor multiply_left(const at::Tensor& L, const SplitMatrix& V, int64_t columns) {
  const int64_t c = V.weight.size(-1);
  at::Tensor product = at::empty({L.size(0), L.size(1), columns}, L.options());
  multiply_left_out(columns == c ? product : product.narrow(-1, 0, c), L, V.weight);
  if (columns > c && V.bias.defined()) {
    multiply_left_out(product.narrow(-1, c, 1), L, V.bias);
  } else if (columns > c) {
    product.narrow(-1, c, 1).zero_();
  }
  return product;
}

// `count` columns of X R from `first` on, with R [groups, n, n] or its diagonal [groups, n].
at::Tensor right_columns(const at::Tensor& X, const at::Tensor& R, int64_t first, int64_t count) {
  if (R.dim() == 2) {
    return X.narrow(-1, first, count) * R.narrow(-1, first, count).unsqueeze(-2);
  }
  return at::bmm(X, R.narrow(-1, first, count));
}

// X R in the two parts and shapes of V.
LayerTensors multiply_right(const at::Tensor& X, const at::Tensor& R, const LayerTensors& V) {
  const int64_t c = V.weight.numel() / V.weight.size(0);
  LayerTensors result{right_columns(X, R, 0, c).view(V.weight.sizes()), {}};
  if (V.bias.defined()) {
    result.bias = right_columns(X, R, c, 1).view(V.bias.sizes());
  }
  return result;
}

at::Tensor transposed(const at::Tensor& root) { return root.dim() == 2 ? root : root.mT(); }

// lambda_G lambda_A^T + damping, or s + damping with EKFAC; 1 for a group without eigenvalues yet.
at::Tensor damped_eigenvalues(const KfacLayer& layer) {
  const at::Tensor lambda_G = layer.G_eigenvalues.unsqueeze(-1);
  const at::Tensor damped =
      (layer.second_moments.defined() ? layer.second_moments.clamp_min(layer.floor * layer.floor)
                                      : at::mul(lambda_G, layer.A_eigenvalues.unsqueeze(-2)))
          .add_(layer.damping);
  const at::Tensor none = lambda_G.lt(0);
  if (none.is_cpu() && !none.any().item<bool>()) {
    return damped;
  }
  return at::where(none, at::ones({}, damped.options()), damped);
}

bool have_one_shape(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() == b.defined() &&
         (!a.defined() || (a.sizes() == b.sizes() && a.dtype() == b.dtype()));
}

// Whether the layers can be joined along their groups.
bool are_alike(const KfacLayer& a, const LayerTensors& V, const KfacLayer& b,
               const LayerTensors& W) {
  return have_one_shape(a.A_root, b.A_root) && have_one_shape(a.G_root, b.G_root) &&
         have_one_shape(a.K, b.K) && have_one_shape(a.C, b.C) &&
         have_one_shape(a.second_moments, b.second_moments) &&
         V.weight.numel() == W.weight.numel() && V.bias.defined() == W.bias.defined() &&
         a.damping == b.damping && a.floor == b.floor;
}

using Members = std::vector<size_t>;

// What a direction depends on, of all members along dimension 0.
KfacLayer joined(const std::vector<const KfacLayer*>& layers, const Members& members) {
  const auto all = [&](at::Tensor KfacLayer::*tensor) {
    std::vector<at::Tensor> parts;
    for (const size_t i : members) {
      if ((layers[i]->*tensor).defined()) {
        parts.push_back(layers[i]->*tensor);
      }
    }
    return parts.empty() ? at::Tensor() : at::cat(parts);
  };
  KfacLayer layer;
  layer.A_root = all(&KfacLayer::A_root);
  layer.G_root = all(&KfacLayer::G_root);
  layer.K = all(&KfacLayer::K);
  layer.C = all(&KfacLayer::C);
  layer.A_eigenvalues = all(&KfacLayer::A_eigenvalues);
  layer.G_eigenvalues = all(&KfacLayer::G_eigenvalues);
  layer.second_moments = all(&KfacLayer::second_moments);
  layer.damping = layers[members[0]]->damping;
  layer.floor = layers[members[0]]->floor;
  return layer;
}

LayerTensors joined(const std::vector<LayerTensors>& V, const Members& members) {
  std::vector<at::Tensor> weights, biases;
  for (const size_t i : members) {
    weights.push_back(V[i].weight.flatten(1));
    if (V[i].bias.defined()) {
      biases.push_back(V[i].bias);
    }
  }
  return {at::cat(weights), biases.empty() ? at::Tensor() : at::cat(biases)};
}

}  // namespace

std::vector<LayerTensors> kfac_directions(const std::vector<const KfacLayer*>& layers,
                                          DampingSplit split, const std::vector<LayerTensors>& V) {
  std::vector<Members> groups;
  for (const auto i : c10::irange(layers.size())) {
    const auto group = std::ranges::find_if(groups, [&](const Members& members) {
      return are_alike(*layers[members[0]], V[members[0]], *layers[i], V[i]);
    });
    (group == groups.end() ? groups.emplace_back() : *group).push_back(i);
  }
  std::vector<LayerTensors> directions(layers.size());
  for (const Members& members : groups) {
    if (members.size() == 1) {
      directions[members[0]] = kfac_direction(*layers[members[0]], split, V[members[0]]);
      continue;
    }
    const LayerTensors all = kfac_direction(joined(layers, members), split, joined(V, members));
    const int64_t rows = V[members[0]].weight.size(0);
    for (const auto k : c10::irange(members.size())) {
      const LayerTensors& of = V[members[k]];
      const auto part = [&](const at::Tensor& tensor) {
        return tensor.narrow(0, static_cast<int64_t>(k) * rows, rows);
      };
      directions[members[k]] = {part(all.weight).view(of.weight.sizes()),
                                of.bias.defined() ? part(all.bias) : at::Tensor()};
    }
  }
  return directions;
}

LayerTensors kfac_direction(const KfacLayer& layer, DampingSplit split, const LayerTensors& V) {
  if (layer.is_inverse_free()) {
    return inverse_free_direction(layer, V);
  }
  const SplitMatrix matrix = split_matrix(V, layer.A_root.size(0));
  const int64_t columns = layer.A_root.size(-1);
  if (split != DampingSplit::kExact) {
    return multiply_right(multiply_left(layer.G_root, matrix, columns), layer.A_root, V);
  }
  const at::Tensor& Q_A = layer.A_root;
  const at::Tensor& Q_G = layer.G_root;
  at::Tensor rotated =
      right_columns(multiply_left(transposed(Q_G), matrix, columns), Q_A, 0, columns);
  rotated.div_(damped_eigenvalues(layer));
  return multiply_right(multiply_left(Q_G, {rotated, {}}, columns), transposed(Q_A), V);
}

}  // namespace torchium::optim::detail
