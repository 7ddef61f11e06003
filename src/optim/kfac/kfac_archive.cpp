// Options and state of KFAC, and what its archives hold.
#include "optim/blocked/block_storage.h"
#include "optim/capture/factor_capture.h"
#include "optim/core/state_checks.h"
#include "optim/kfac/kfac_options.h"
#include "optim/kfac/kfac_parts.h"
#include "optim/kfac/kfac_step.h"
#include "torchium/optim/kfac.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <utility>

namespace torchium::optim {

KFACOptions::KFACOptions(double lr) : lr_(lr) {}

double KFACOptions::get_lr() const { return lr(); }
void KFACOptions::set_lr(const double lr) { this->lr(lr); }

void KFACOptions::serialize(torch::serialize::InputArchive& archive) {
  detail::read_options(archive, *this);
}
void KFACOptions::serialize(torch::serialize::OutputArchive& archive) const {
  detail::write_options(archive, *this);
}

bool operator==(const KFACOptions& lhs, const KFACOptions& rhs) {
  return detail::equal_options(lhs, rhs);
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
          {"factor_updates", &factor_updates()},
          {"root_failures", &root_failures()}};
}

std::vector<std::pair<std::string, at::Tensor>> KFACParamState::tensors() const {
  auto result = SecondOrderParamState::tensors();
  // factors() gives addresses for writing too; nothing is written here.
  for (const auto& [key, tensor] : const_cast<KFACParamState*>(this)->factors()) {
    if (tensor->defined()) {
      result.emplace_back(key, *tensor);
    }
  }
  return result;
}

void KFACParamState::serialize(torch::serialize::InputArchive& archive) {
  SecondOrderParamState::serialize(archive);
  for (const auto& [key, tensor] : factors()) {
    archive.try_read(key, *tensor, /*is_buffer=*/true);
  }
}

bool KFACParamState::is_of(const at::Tensor& param) {
  return SecondOrderParamState::is_of(param) &&
         (!A().defined() || A().scalar_type() == detail::state_dtype(param));
}

void KFACParamState::convert_to(const at::Tensor& param) {
  SecondOrderParamState::convert_to(param);
  for (const auto& [key, tensor] : factors()) {
    if (tensor->defined()) {
      const bool is_count = tensor == &factor_updates() || tensor == &root_failures();
      *tensor =
          tensor->to(param.device(), is_count ? tensor->scalar_type() : detail::state_dtype(param));
    }
  }
}

namespace detail {
namespace {

int64_t fan_in(const at::Tensor& matrix) {
  return matrix.size(0) == 0 ? 0 : matrix.numel() / matrix.size(0);
}

// Zero factors and what is made of them before the first inversion.
KfacLayer fresh_layer(const at::Tensor& weight, const FactorLayer& layer, DampingSplit split) {
  return kfac_init_state(layer.matrix(weight), layer.has_bias_row, layer.groups, split,
                         layer.diagonal_A, layer.diagonal_G);
}

void set_roots(KFACParamState& state, const KfacLayer& fresh, DampingSplit split) {
  state.root_failures(fresh.root_failures);
  state.A_inverse({}).G_inverse({});
  state.A_eigenvectors({}).G_eigenvectors({}).A_eigenvalues({}).G_eigenvalues({});
  if (split == DampingSplit::kExact) {
    state.A_eigenvectors(fresh.A_root).G_eigenvectors(fresh.G_root);
    state.A_eigenvalues(fresh.A_eigenvalues).G_eigenvalues(fresh.G_eigenvalues);
  } else {
    state.A_inverse(fresh.A_root).G_inverse(fresh.G_root);
  }
}

// The damping_split, or another that keeps the same, which has made the saved inverses. The option
// may have changed since; the next step sees to that.
std::string saved_split(KFACParamState& saved, const std::string& damping_split) {
  for (const char* split : {"exact", "pi"}) {
    if (has_roots(saved, split)) {
      return split;
    }
  }
  return damping_split;
}

}  // namespace

const KFACOptions& kfac_options(const torch::optim::OptimizerOptions& options) {
  const auto* result = dynamic_cast<const KFACOptions*>(&options);
  TORCH_CHECK_VALUE(result != nullptr, "a parameter group of KFAC needs KFACOptions");
  return *result;
}

bool factors_fit(const at::Tensor& weight, const at::Tensor& A, const at::Tensor& G) {
  const auto fits = [&](const at::Tensor& matrix) {
    const int64_t rows_of_bias = A.size(-1) - fan_in(matrix);
    return (rows_of_bias == 0 || rows_of_bias == 1) && A.size(0) * G.size(-1) == matrix.size(0);
  };
  return weight.dim() >= 2 && (fits(weight) || (weight.dim() == 2 && fits(weight.mT())));
}

FactorLayer layer_of_factors(const at::Tensor& weight, const at::Tensor& A, const at::Tensor& G) {
  FactorLayer layer;
  layer.diagonal_A = A.dim() == 2;
  layer.diagonal_G = G.defined() && G.dim() == 2;
  layer.is_transposed = weight.dim() == 2 && G.defined() && G.dim() >= 2 &&
                        weight.size(0) != weight.size(1) && G.size(-1) == weight.size(1);
  const at::Tensor matrix = layer.matrix(weight);
  if (A.dim() >= 2 && A.size(0) > 0 && matrix.size(0) % A.size(0) == 0) {
    layer.groups = A.size(0);
  }
  layer.has_bias_row = A.dim() >= 2 && A.size(-1) == fan_in(matrix) + 1;
  return layer;
}

void add_factors(KFACParamState& state, const at::Tensor& weight, const FactorLayer& seen,
                 const std::string& damping_split) {
  const auto split = parse_damping_split(damping_split);
  const auto fresh = fresh_layer(weight, seen, split);
  state.A(fresh.A).G(fresh.G).factor_updates(fresh.factor_updates);
  set_roots(state, fresh, split);
}

bool has_roots(KFACParamState& state, const std::string& damping_split) {
  return (damping_split == "exact" ? state.A_eigenvectors() : state.A_inverse()).defined();
}

void reset_roots(KFACParamState& state, const at::Tensor& weight,
                 const std::string& damping_split) {
  const auto split = parse_damping_split(damping_split);
  set_roots(state, fresh_layer(weight, layer_of_factors(weight, state.A(), state.G()), split),
            split);
}

}  // namespace detail

void KFAC::fit_loaded(const Options& options, const std::vector<at::Tensor>& params,
                      const std::vector<SecondOrderParamState*>& loaded,
                      const std::vector<SecondOrderParamState*>& fitted) const {
  for (const auto i : c10::irange(params.size())) {
    const at::Tensor& weight = params[i];
    auto& source = static_cast<KFACParamState&>(*loaded[i]);
    auto& target = static_cast<KFACParamState&>(*fitted[i]);
    if (!source.A().defined() || weight.dim() < 2) {
      continue;
    }
    detail::add_factors(target, weight, detail::layer_of_factors(weight, source.A(), source.G()),
                        detail::saved_split(source, detail::kfac_options(options).damping_split()));
    const auto sources = source.factors();
    const auto targets = target.factors();
    for (const auto k : c10::irange(targets.size())) {
      const auto& [key, tensor] = targets[k];
      if (tensor->defined()) {
        TORCH_CHECK_VALUE(sources[k].second->defined(), "the archive has no ", key, " of ",
                          describe(weight));
        detail::check_fits(*sources[k].second, *tensor, key, describe(weight));
        tensor->copy_(*sources[k].second);
      }
    }
  }
}

// Which bias shares the factors of which weight: rows of two positions in all_params(), -1 for
// none, and whether the weight is [in, out].
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
    const auto* layer = capture_->layer(params[i]);
    if (state != nullptr && state->A().defined() && layer != nullptr) {
      rows.insert(rows.end(), {static_cast<int64_t>(i), position(layer->bias),
                               static_cast<int64_t>(layer->is_transposed)});
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
  return [this, rows, params] {
    *notes_ = Notes();
    capture_->forget_layers();
    for (const auto i : c10::irange(rows.size(0))) {
      const at::Tensor& weight = params[rows[i][0].item<int64_t>()];
      const auto bias = rows[i][1].item<int64_t>();
      const KFACParamState* state = state_of(weight);
      if (state != nullptr && state->A().defined()) {
        auto layer = detail::layer_of_factors(weight, state->A(), state->G());
        layer.bias = bias >= 0 ? params[bias] : at::Tensor();
        layer.is_transposed = rows[i][2].item<int64_t>() != 0;
        capture_->set_layer(weight, std::move(layer));
      }
    }
    forget_captures();
  };
}

}  // namespace torchium::optim
