// Options, state and archives of KFAC.
#include "optim/core/parameter_state.h"
#include "optim/kfac/kfac_options.h"
#include "optim/kfac/kfac_plan.h"
#include "optim/kfac/skipped_layers.h"
#include "torchium/optim/kfac.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <initializer_list>

namespace torchium::optim {

KFACOptions::KFACOptions(double lr) : lr_(lr) {}

template struct OptionsOf<KFACOptions>;

void check_inverse_free(const KFACOptions& o, const char* name_of_TInv) {
  const KFACOptions defaults;
  const auto require_default = [](const char* name, const auto& value, const auto& only,
                                  const char* why) {
    using detail::text_of;
    TORCH_CHECK_VALUE(value == only, name, "=", text_of(value), " has no meaning with solver=", why,
                      "; leave it at ", text_of(only));
  };
  if (detail::is_inverse_free(o)) {
    require_default(name_of_TInv, o.TInv(), defaults.TInv(),
                    "'inverse_free', which inverts nothing and corrects K and C with every factor");
    require_default("damping_split", o.damping_split(), defaults.damping_split(),
                    "'inverse_free', which damps the Fisher matrix as a whole");
    return;
  }
  const std::string other = detail::text_of(o.solver()) + ", but only with 'inverse_free'";
  require_default("structures", o.structures(), defaults.structures(), other.c_str());
  require_default("block_size", o.block_size(), defaults.block_size(), other.c_str());
  require_default("alpha1", o.alpha1(), defaults.alpha1(), other.c_str());
}

void check_combination(const KFACOptions& o) {
  check_inverse_free(o);
  TORCH_CHECK_VALUE(
      o.damping_split() != "exact" || o.solver() == "auto" || o.solver() == "eigh", "solver='",
      o.solver(), "' has no eigenvectors, which damping_split='exact' needs; use 'eigh' or 'auto'");
  TORCH_CHECK_VALUE(!o.ekfac() || o.damping_split() == "exact",
                    "ekfac=True needs eigenvectors; use damping_split='exact', got '",
                    o.damping_split(), "'");
  detail::check_adaptive_damping(o.adaptive_damping(), o.momentum());
  detail::check_capturable(o.capturable(), o.adaptive_damping());
  TORCH_CHECK_VALUE(!o.capturable() || o.solver() != "inverse_free",
                    "solver='inverse_free' has no inverses that update_preconditioners() could "
                    "renew; with capturable=True use another solver");
  detail::check_grad_workers(o.grad_worker_fraction(), o.ekfac());
  detail::check_skip_layers(o.skip_layers());
}

std::unique_ptr<torch::optim::OptimizerParamState> KFACParamState::clone() const {
  return std::make_unique<KFACParamState>(*this);
}

std::vector<SecondOrderParamState::NamedTensor> KFACParamState::parameter_shaped() {
  return {{"momentum_buffer", &momentum_buffer()}};
}

std::vector<SecondOrderParamState::NamedTensor> KFACParamState::factors() {
  return {{"A", &A()},
          {"G", &G()},
          {"A_inverse", &A_inverse()},
          {"G_inverse", &G_inverse()},
          {"A_eigenvectors", &A_eigenvectors()},
          {"G_eigenvectors", &G_eigenvectors()},
          {"A_eigenvalues", &A_eigenvalues()},
          {"G_eigenvalues", &G_eigenvalues()},
          {"second_moments", &second_moments()},
          {"moment_updates", &moment_updates()},
          {"fisher_blocks", &fisher_blocks()},
          {"factor_updates", &factor_updates()},
          {"root_failures", &root_failures()},
          {"K", &K()},
          {"C", &C()},
          {"m_K", &m_K()},
          {"m_C", &m_C()}};
}

std::vector<SecondOrderParamState::NamedTensor> KFACParamState::members() {
  auto all = SecondOrderParamState::members();
  const auto of_layer = factors();
  all.insert(all.end(), of_layer.begin(), of_layer.end());
  return all;
}

bool KFACParamState::is_of(const at::Tensor& param) {
  const at::Tensor& root = A_inverse().defined()        ? A_inverse()
                           : A_eigenvectors().defined() ? A_eigenvectors()
                                                        : fisher_blocks();
  return SecondOrderParamState::is_of(param) &&
         (!root.defined() || root.scalar_type() == detail::state_dtype(param));
}

// The plan converts A and G, or K, C and their momenta, whose dtype is an option.
void KFACParamState::convert_to(const at::Tensor& param) {
  SecondOrderParamState::convert_to(param);
  for (const auto& [key, tensor] : factors()) {
    if (tensor->defined()) {
      const std::initializer_list<const at::Tensor*> of_option{&A(), &G(),   &K(),
                                                               &C(), &m_K(), &m_C()};
      const bool stays = std::ranges::find(of_option, tensor) != of_option.end() ||
                         tensor == &factor_updates() || tensor == &moment_updates() ||
                         tensor == &root_failures();
      *tensor =
          tensor->to(param.device(), stays ? tensor->scalar_type() : detail::state_dtype(param));
    }
  }
}

namespace {

bool has_curvature(const KFACParamState& state) {
  return detail::factor_of_inputs(state).defined() || state.fisher_blocks().defined();
}

}  // namespace

// One row per weight with factors: its position in all_params(), that of its bias (-1: none), and
// its form: 1 for [in, out], 2 for that of a transposed convolution, otherwise 0.
void KFAC::save_more(torch::serialize::OutputArchive& archive) const {
  const auto params = all_params();
  const auto position = [&](const at::Tensor& param) -> int64_t {
    const auto found = std::find_if(params.begin(), params.end(),
                                    [&](const auto& other) { return other.is_same(param); });
    return found == params.end() ? -1 : found - params.begin();
  };
  std::vector<int64_t> rows;
  for (const auto i : c10::irange(params.size())) {
    KFACParamState* state = state_of(params[i]);
    const auto* layer = plan().records().layer(params[i]);
    if (state != nullptr && has_curvature(*state) && layer != nullptr) {
      const int64_t form = layer->is_transposed_convolution ? 2 : layer->is_transposed ? 1 : 0;
      rows.insert(rows.end(), {static_cast<int64_t>(i), position(layer->bias), form});
    }
  }
  archive.write("layers", at::tensor(rows, at::kLong).view({-1, 3}), /*is_buffer=*/true);
}

std::function<void()> KFAC::read_more(torch::serialize::InputArchive& archive) {
  at::Tensor rows;
  TORCH_CHECK_VALUE(archive.try_read("layers", rows, /*is_buffer=*/true),
                    "the archive has no entry 'layers'; it was not written by KFAC");
  const auto params = all_params();
  const auto count = static_cast<int64_t>(params.size());
  TORCH_CHECK_VALUE(rows.scalar_type() == at::kLong && rows.dim() == 2 && rows.size(1) == 3 &&
                        (rows < count).all().item<bool>() && (rows >= -1).all().item<bool>() &&
                        (rows.select(1, 0) >= 0).all().item<bool>(),
                    "the entry 'layers' of the archive does not fit the optimizer's ", count,
                    " parameters");
  return [this, rows] {
    bind();
    std::vector<detail::DeclaredLayer> layers;
    const auto row = rows.accessor<int64_t, 2>();
    for (const auto i : c10::irange(rows.size(0))) {
      const KFACParamState* state = state_of(plan().param(row[i][0]));
      if (state != nullptr && has_curvature(*state)) {
        layers.push_back({.weight = row[i][0],
                          .bias = row[i][1],
                          .is_transposed = row[i][2] == 1,
                          .is_unitwise = state->fisher_blocks().defined(),
                          .is_transposed_convolution = row[i][2] == 2});
      }
    }
    plan().declare(layers);
    forget_captures();
  };
}

}  // namespace torchium::optim
