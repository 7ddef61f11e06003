// Operators of K-FAC: schemas and registration, no maths. See optim/kfac/kfac_step.h.

#include "ops/in_place_fake.h"
#include "optim/kfac/kfac_step.h"

#include <ATen/ATen.h>
#include <torch/library.h>

namespace torchium::ops {
namespace {

using optim::detail::KfacHyperparameters;
using optim::detail::KfacLayer;
using optim::detail::KfacState;

std::vector<at::Tensor> kfac_init_state(const at::Tensor& weight, bool has_bias, int64_t groups,
                                        std::string damping_split, bool diagonal_A,
                                        bool diagonal_G) {
  KfacLayer layer = optim::detail::kfac_init_state(
      weight, has_bias, groups, optim::detail::parse_damping_split(damping_split), diagonal_A,
      diagonal_G);
  return {layer.A,
          layer.G,
          layer.A_root,
          layer.G_root,
          layer.A_eigenvalues,
          layer.G_eigenvalues,
          layer.factor_updates,
          layer.root_failures};
}

template <typename List>
void check_length(const List& list, size_t count, const char* name, const char* of) {
  TORCH_CHECK_VALUE(list.size() == count, name, " has ", list.size(), " entries for ", count, " ",
                    of, "; pass one each");
}

// Rows of `layers`: weight, bias, samples, rows, inverse_due, inverse_lost.
constexpr size_t kLayerColumns = 6;

void kfac_step_(at::TensorList params, at::TensorList grads, at::TensorList steps,
                at::TensorList momentum_buffers, at::Tensor status, at::TensorList A,
                at::TensorList G, at::TensorList A_roots, at::TensorList G_roots,
                at::TensorList A_eigenvalues, at::TensorList G_eigenvalues,
                at::TensorList factor_updates, at::TensorList root_failures, at::TensorList A_sums,
                at::TensorList G_sums, at::IntArrayRef layers, at::TensorList lrs,
                at::ArrayRef<double> momentums, at::ArrayRef<double> weight_decays,
                const c10::List<bool>& maximize, at::ArrayRef<double> dampings,
                at::ArrayRef<double> stat_decays, at::ArrayRef<double> floors, bool batch_averaged,
                std::optional<double> kl_clip, std::string damping_split,
                const std::optional<at::Tensor>& found_inf, std::string root_method) {
  check_length(lrs, params.size(), "lrs", "params");
  check_length(momentums, params.size(), "momentums", "params");
  check_length(weight_decays, params.size(), "weight_decays", "params");
  check_length(maximize, params.size(), "maximize", "params");
  TORCH_CHECK_VALUE(
      layers.size() % kLayerColumns == 0, "layers has ", layers.size(),
      " entries; pass rows of weight, bias, samples, rows, inverse_due, inverse_lost");
  const size_t count = layers.size() / kLayerColumns;
  for (const auto& [list, name] : {std::pair{A, "A"},
                                   {G, "G"},
                                   {A_roots, "A_roots"},
                                   {G_roots, "G_roots"},
                                   {A_eigenvalues, "A_eigenvalues"},
                                   {G_eigenvalues, "G_eigenvalues"},
                                   {factor_updates, "factor_updates"},
                                   {root_failures, "root_failures"},
                                   {A_sums, "A_sums"},
                                   {G_sums, "G_sums"}}) {
    check_length(list, count, name, "layers");
  }
  check_length(dampings, count, "dampings", "layers");
  check_length(stat_decays, count, "stat_decays", "layers");
  check_length(floors, count, "floors", "layers");

  KfacHyperparameters h{.parameters = {},
                        .batch_averaged = batch_averaged,
                        .kl_clip = kl_clip,
                        .damping_split = optim::detail::parse_damping_split(damping_split),
                        .root_method = std::move(root_method),
                        .found_inf = found_inf.value_or(at::Tensor())};
  for (size_t i = 0; i < params.size(); ++i) {
    h.parameters.push_back({lrs[i], momentums[i], weight_decays[i], maximize[i]});
  }
  std::vector<KfacLayer> rows;
  for (size_t i = 0; i < count; ++i) {
    const int64_t* row = layers.data() + kLayerColumns * i;
    rows.push_back({.weight = row[0],
                    .bias = row[1],
                    .A_sum = A_sums[i],
                    .G_sum = G_sums[i],
                    .samples = row[2],
                    .rows = row[3],
                    .inverse_due = row[4] != 0,
                    .inverse_lost = row[5] != 0,
                    .damping = dampings[i],
                    .stat_decay = stat_decays[i],
                    .floor = floors[i],
                    .A = A[i],
                    .G = G[i],
                    .A_root = A_roots[i],
                    .G_root = G_roots[i],
                    .A_eigenvalues = A_eigenvalues[i],
                    .G_eigenvalues = G_eigenvalues[i],
                    .factor_updates = factor_updates[i],
                    .root_failures = root_failures[i]});
  }
  KfacState state{steps.vec(), momentum_buffers.vec(), std::move(status)};
  optim::detail::kfac_step(h, params, grads, rows, state);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  m.def(
      "kfac_init_state(Tensor weight, *, bool has_bias, int groups, str damping_split, "
      "bool diagonal_A=False, bool diagonal_G=False) -> Tensor[]");
  m.def(
      "kfac_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] steps, "
      "Tensor(c!)[] momentum_buffers, Tensor(d!) status, Tensor(e!)[] A, Tensor(f!)[] G, "
      "Tensor(g!)[] A_roots, Tensor(h!)[] G_roots, Tensor(i!)[] A_eigenvalues, "
      "Tensor(j!)[] G_eigenvalues, Tensor(k!)[] factor_updates, Tensor(l!)[] root_failures, "
      "Tensor[] A_sums, Tensor[] G_sums, int[] layers, *, Tensor[] lrs, float[] momentums, "
      "float[] weight_decays, bool[] maximize, float[] dampings, float[] stat_decays, "
      "float[] floors, bool batch_averaged, float? kl_clip, str damping_split, "
      "Tensor? found_inf, str root_method=\"eigh\") -> ()");
}

TORCH_LIBRARY_IMPL(torchium, CompositeExplicitAutograd, m) {
  m.impl("kfac_init_state", kfac_init_state);
  m.impl("kfac_step_", kfac_step_);
}

TORCH_LIBRARY_IMPL(torchium, Meta, m) { m.impl("kfac_step_", InPlaceFake<&kfac_step_>::call); }

}  // namespace torchium::ops
