#include "optim/kfac/factors/inverse_free.h"

#include "linalg/products/structured_matrix.h"
#include "linalg/spectral/spectral.h"
#include "optim/kfac/cuda/square_products.h"
#include "support/tensor_version.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <utility>

namespace torchium::optim::detail {
namespace {

using linalg::detail::average_trace;
using linalg::detail::structured_multiply;
using Layers = std::vector<KfacLayer*>;

// K or C of some layers of one shape, along dimension 0.
struct Side {
  at::Tensor root;
  at::Tensor momentum;   // undefined: alpha1 is 0
  at::Tensor curvature;  // P(K^T A K)
  at::Tensor gram;       // P(K^T K)
};

// The members of KfacLayer on one side.
struct SideMembers {
  at::Tensor KfacLayer::*root;
  at::Tensor KfacLayer::*momentum;
  at::Tensor KfacLayer::*sum;
  double KfacLayer::*scale;
};
constexpr SideMembers kInputs{&KfacLayer::K, &KfacLayer::m_K, &KfacLayer::A_sum,
                              &KfacLayer::A_scale};
constexpr SideMembers kGradients{&KfacLayer::C, &KfacLayer::m_C, &KfacLayer::G_sum,
                                 &KfacLayer::G_scale};

std::vector<at::Tensor> all(const Layers& layers, at::Tensor KfacLayer::*member) {
  std::vector<at::Tensor> tensors;
  for (const KfacLayer* layer : layers) {
    if ((layer->*member).defined()) {
      tensors.push_back(layer->*member);
    }
  }
  return tensors;
}

// Along dimension 0; undefined: there are none.
at::Tensor joined_along_groups(const std::vector<at::Tensor>& tensors) {
  return tensors.empty() ? at::Tensor() : tensors.size() == 1 ? tensors[0] : at::cat(tensors);
}

// [batch] as a factor of stored matrices.
at::Tensor per_matrix(const at::Tensor& numbers, const at::Tensor& like) {
  std::vector<int64_t> sizes(like.dim(), 1);
  sizes[0] = -1;
  return numbers.view(sizes);
}

// P(K^T S K), P(K^T K) and K m.
at::Tensor congruence(const at::Tensor& K, const at::Tensor& S) {
  return has_square_products(K) ? square_congruence(K, S)
                                : linalg::detail::structured_congruence(K, S);
}
at::Tensor gram(const at::Tensor& K) {
  return has_square_products(K) ? square_gram(K, /*of_rows=*/false)
                                : linalg::detail::structured_gram(K);
}
at::Tensor product(const at::Tensor& K, const at::Tensor& m) {
  return has_square_products(K) ? square_product(K, m) : linalg::detail::structured_product(K, m);
}

// Computed in float32 at least.
Side side_of(const Layers& layers, const SideMembers& members) {
  std::vector<at::Tensor> sums = all(layers, members.sum);
  std::vector<at::Scalar> scales;
  for (const KfacLayer* layer : layers) {
    scales.emplace_back(layer->*members.scale);
  }
  sums = at::_foreach_mul(sums, scales);
  Side side;
  side.root = joined_along_groups(all(layers, members.root));
  const auto dtype = at::promote_types(side.root.scalar_type(), sums[0].scalar_type());
  side.root = side.root.to(dtype);
  side.momentum = joined_along_groups(all(layers, members.momentum));
  side.curvature = congruence(side.root, joined_along_groups(sums).to(dtype));
  side.gram = gram(side.root);
  return side;
}

// m <- alpha1 m + (1 - alpha1)/2 (tr(other curvature) curvature + damping tr(other gram) gram - I)
at::Tensor new_momentum(const Side& side, const Side& other, double damping, double alpha1) {
  const at::Tensor& H = side.curvature;
  at::Tensor m = H * per_matrix(average_trace(other.curvature), H);
  m.addcmul_(side.gram, per_matrix(average_trace(other.gram), H), damping);
  linalg::detail::add_to_diagonal_(m, -1.0);
  m.mul_((1.0 - alpha1) / 2.0);
  return side.momentum.defined() ? m.add_(side.momentum, alpha1) : m;
}

// K (I - b m)
at::Tensor corrected(const at::Tensor& root, const at::Tensor& m, double rate) {
  const at::Tensor b = linalg::detail::largest_row_sum(m).mul_(2.0).reciprocal_().clamp_max_(rate);
  return at::addcmul(root, product(root, m), per_matrix(b, root), -1.0);
}

// target <- value where `accepted`, with parts of the value for each layer.
void store(const std::vector<at::Tensor>& targets, const at::Tensor& value,
           const at::Tensor& accepted) {
  if (targets.empty()) {
    return;
  }
  const at::Tensor old = joined_along_groups(targets);
  const at::Tensor kept = at::where(per_matrix(accepted, value), value.to(old.scalar_type()), old);
  at::_foreach_copy_(targets, kept.chunk(static_cast<int64_t>(targets.size())));
}

// [layers, 2] <- 0 where K and C of all groups were accepted, else one more.
void count_failures(const Layers& layers, const at::Tensor& K_accepted,
                    const at::Tensor& C_accepted, const FoundInfGuard& guard) {
  const auto count = static_cast<int64_t>(layers.size());
  const auto of_layers = [&](const at::Tensor& accepted) {
    return accepted.view({count, -1}).all(1);
  };
  const at::Tensor ok = at::stack({of_layers(K_accepted), of_layers(C_accepted)}, 1);
  const auto targets = all(layers, &KfacLayer::root_failures);
  const at::Tensor old = at::stack(targets);
  at::Tensor failures = old.clone();
  guard.assign_(failures, at::where(ok, at::zeros_like(old), old + 1));
  at::_foreach_copy_(targets, failures.unbind());
}

void update_alike(const Layers& layers, const FoundInfGuard& guard) {
  const KfacLayer& first = *layers[0];
  const Side K = side_of(layers, kInputs);
  const Side C = side_of(layers, kGradients);
  const at::Tensor m_K = new_momentum(K, C, first.damping, first.alpha1);
  const at::Tensor m_C = new_momentum(C, K, first.damping, first.alpha1);
  const double rate = 1.0 - first.stat_decay;
  const at::Tensor new_K = corrected(K.root, m_K, rate);
  const at::Tensor new_C = corrected(C.root, m_C, rate);
  const auto is_finite_in = [](const at::Tensor& value, const at::Tensor& stored) {
    return linalg::detail::is_finite(value.to(stored.scalar_type()));
  };
  const at::Tensor K_accepted =
      is_finite_in(new_K, first.K).logical_and_(is_finite_in(m_K, first.K));
  const at::Tensor C_accepted =
      is_finite_in(new_C, first.C).logical_and_(is_finite_in(m_C, first.C));
  const at::Tensor accepted = guard.restrict(K_accepted.logical_and(C_accepted));
  store(all(layers, &KfacLayer::K), new_K, accepted);
  store(all(layers, &KfacLayer::C), new_C, accepted);
  store(all(layers, &KfacLayer::m_K), m_K, accepted);
  store(all(layers, &KfacLayer::m_C), m_C, accepted);
  count_failures(layers, K_accepted, C_accepted, guard);
  const auto updates = all(layers, &KfacLayer::factor_updates);
  if (updates[0].is_cpu()) {  // where a skipped step ends before
    at::_foreach_add_(updates, 1);
  } else {
    guard.advance(updates);
  }
}

// K K^T of stored matrices, dense or diagonal.
at::Tensor square_of(const at::Tensor& K) {
  return K.dim() == 2             ? K.square()
         : has_square_products(K) ? square_gram(K, /*of_rows=*/true)
                                  : at::bmm(K, K.mT());
}

bool can_be_joined(const KfacLayer& a, const KfacLayer& b) {
  const auto have_one_kind = [](const at::Tensor& x, const at::Tensor& y) {
    return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type();
  };
  return !a.K.is_cpu() && have_one_kind(a.K, b.K) && have_one_kind(a.C, b.C) &&
         a.A_sum.scalar_type() == b.A_sum.scalar_type() && a.damping == b.damping &&
         a.alpha1 == b.alpha1 && a.stat_decay == b.stat_decay;  // copies take longer on a CPU
}

}  // namespace

void update_inverse_free(std::vector<KfacLayer>& layers, const FoundInfGuard& guard) {
  std::vector<Layers> alike;
  for (KfacLayer& layer : layers) {
    if (!layer.has_sums() || !layer.inverts) {
      continue;
    }
    const auto group = std::ranges::find_if(
        alike, [&](const Layers& members) { return can_be_joined(*members[0], layer); });
    (group == alike.end() ? alike.emplace_back() : *group).push_back(&layer);
  }
  for (const Layers& members : alike) {
    update_alike(members, guard);
  }
}

bool has_squares(const KfacLayer& layer) {
  return layer.is_inverse_free() && layer.A_root.defined();
}

void make_room_for_squares(KfacLayer& layer) {
  layer.A = layer.A_root = at::empty_like(layer.K);
  layer.G = layer.G_root = at::empty_like(layer.C);
  layer.seen_versions = -1;
}

void drop_squares(KfacLayer& layer) {
  layer.A = layer.G = layer.A_root = layer.G_root = at::Tensor();
}

void renew_squares(std::vector<KfacLayer>& layers) {
  std::map<std::vector<int64_t>, std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>> all;
  for (KfacLayer& layer : layers) {
    if (!has_squares(layer)) {
      continue;
    }
    const int64_t versions =  // each only rises
        torchium::detail::version_of(layer.K) + torchium::detail::version_of(layer.C);
    const bool has_versions = !layer.K.is_inference() && !layer.C.is_inference();
    if (std::exchange(layer.seen_versions, versions) == versions && has_versions) {
      continue;
    }
    for (const auto& [root, square] :
         {std::pair(layer.K, layer.A_root), std::pair(layer.C, layer.G_root)}) {
      auto& [roots, squares] = all[root.sizes().vec()];
      roots.push_back(root);
      squares.push_back(square);
    }
  }
  for (const auto& [sizes, matrices] : all) {
    const at::Tensor squares = square_of(joined_along_groups(matrices.first));
    at::_foreach_copy_(matrices.second,
                       squares.chunk(static_cast<int64_t>(matrices.second.size())));
  }
}

// (K K^T (C C^T V)^T)^T
LayerTensors inverse_free_direction(const KfacLayer& layer, const LayerTensors& V) {
  const int64_t groups = layer.K.size(0);
  const int64_t rows = V.weight.size(0) / groups;
  at::Tensor matrix = V.weight.reshape({groups, rows, -1});
  const int64_t columns = matrix.size(2);
  if (layer.K.size(1) > columns) {  // of a bias
    matrix = V.bias.defined() ? at::cat({matrix, V.bias.reshape({groups, rows, 1})}, 2)
                              : at::constant_pad_nd(matrix, {0, 1});
  }
  const auto times_square = [&](const at::Tensor& root, const at::Tensor& X) {
    const at::Tensor L = root.to(X.scalar_type());
    return structured_multiply(L, structured_multiply(L, X, /*transposed=*/true));
  };
  matrix = times_square(layer.C, matrix);
  matrix = times_square(layer.K, matrix.mT()).mT();
  LayerTensors result{matrix.narrow(2, 0, columns).reshape(V.weight.sizes()), {}};
  if (V.bias.defined()) {
    result.bias = matrix.select(2, columns).reshape(V.bias.sizes());
  }
  return result;
}

}  // namespace torchium::optim::detail
