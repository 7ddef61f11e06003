#include "optim/blocked/elementwise.h"
#include "optim/core/argument_checks.h"
#include "optim/kfac/kfac_direction.h"
#include "optim/kfac/kfac_subset.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {
namespace {

using Tensors = std::vector<at::Tensor>;

class EagerSubset : public KfacSubset {
 public:
  EagerSubset(const KfacGroup& group, KfacMembers members)
      : group_(group), members_(std::move(members)), has_layer_(group.params.size(), false) {
    for (const size_t l : members_.layers) {
      for (const int64_t i : group.layers[l].params()) {
        has_layer_[i] = true;
      }
    }
  }

  void update_factors(const KfacRun& run) override {
    for (const size_t l : members_.layers) {
      if (group_.layers[l].has_sums()) {
        update_factors(group_.layers[l], run.prologue.guard());
      }
    }
  }

  void precondition(const KfacRun& run) override {
    const FoundInfGuard guard = run.prologue.guard();
    V_.resize(group_.params.size());
    for (const size_t i : members_.params) {
      const KfacParameterOptions& o = group_.options[i];
      V_[i] = signed_gradient(group_.params[i], run.grads[i], o.maximize, o.weight_decay, guard);
    }
    directions_ = V_;
    for (const size_t l : members_.layers) {
      precondition(group_.layers[l]);
    }
    find_learning_rates(guard);
  }

  at::Tensor kl_terms(const KfacRun&) override {
    Tensors terms;
    for (const size_t l : members_.layers) {
      for (const int64_t i : group_.layers[l].params()) {
        const at::Tensor product =
            at::dot(directions_[i].reshape(-1), V_[i].reshape(-1)).to(at::kDouble);
        const at::Tensor& lr = lrs_[i].device;
        terms.push_back(lr.defined() ? product * lr.to(at::kDouble).square()
                                     : product * lrs_[i].host * lrs_[i].host);
      }
    }
    return terms.empty() ? at::Tensor() : at::stack(terms);
  }

  void apply(const KfacRun& run, const StepScalar& nu) override {
    if (group_.shared.writes_gradients) {
      write_gradients(run, nu);
      return;
    }
    for (const size_t i : members_.params) {
      const UpdateRule rule{.momentum = group_.options[i].momentum,
                            .direction_scale = has_layer_[i] ? nu : StepScalar()};
      at::Tensor param = group_.params[i], buffer = group_.states[i].momentum_buffer;
      apply_update(rule, lrs_[i], param, directions_[i], buffer.defined() ? &buffer : nullptr,
                   run.prologue.guard());
    }
  }

  void end() override {
    V_.clear();
    directions_.clear();
    lrs_.clear();
  }

 private:
  static void update_factors(const KfacLayer& layer, const FoundInfGuard& guard) {
    at::Tensor A = layer.A, G = layer.G, updates = layer.factor_updates;
    if (A.is_cpu()) {
      updates.add_(1);
      const double d = std::min(1.0 - 1.0 / updates.item<double>(), layer.stat_decay);
      scale_and_add_(A, d, layer.A_sum, (1.0 - d) * layer.A_scale);
      scale_and_add_(G, d, layer.G_sum, (1.0 - d) * layer.G_scale);
      return;
    }
    guard.advance(updates);
    const at::Tensor k = updates.to(at::kDouble).clamp_min_(1.0);
    const at::Tensor d = (1.0 - k.reciprocal()).clamp_max_(layer.stat_decay);
    const at::Tensor weight = guard.zero_if_skipped(1.0 - d).to(A.scalar_type());
    A.lerp_(guard.zero_if_skipped(layer.A_sum) * layer.A_scale, weight);
    G.lerp_(guard.zero_if_skipped(layer.G_sum) * layer.G_scale, weight);
  }

  // Entries that are not finite count as zero, and all stop at the largest number of the dtype.
  void write_gradients(const KfacRun& run, const StepScalar& nu) {
    for (const size_t i : members_.params) {
      at::Tensor grad = run.grads[i];
      const double most = largest_number(grad.scalar_type());
      const at::Tensor d = finite_entries(nu.multiply(directions_[i])).clamp_(-most, most);
      run.prologue.guard().assign_(grad, d);
    }
  }

  void precondition(const KfacLayer& layer) {
    const at::Tensor bias = layer.bias < 0 ? at::Tensor() : V_[layer.bias];
    const LayerTensors d =
        kfac_direction(layer, group_.shared.damping_split, {V_[layer.weight], bias});
    directions_[layer.weight] = d.weight;
    if (layer.bias >= 0) {
      directions_[layer.bias] = d.bias;
    }
  }

  // A tensor that many share is read once.
  void find_learning_rates(const FoundInfGuard& guard) {
    lrs_.resize(group_.params.size());
    const size_t* before = nullptr;
    for (const size_t& i : members_.params) {
      const at::Tensor& lr = group_.options[i].lr;
      const bool shared = before != nullptr && lr.is_same(group_.options[*before].lr);
      lrs_[i] = shared ? lrs_[*before] : guard.learning_rate(lr);
      before = &i;
    }
  }

  const KfacGroup& group_;
  KfacMembers members_;
  std::vector<bool> has_layer_;  // one per parameter of the group
  // Of one step; one per parameter of the group.
  Tensors V_, directions_;
  std::vector<StepScalar> lrs_;
};

}  // namespace

std::unique_ptr<KfacSubset> make_eager_subset(const KfacGroup& group, KfacMembers members) {
  return std::make_unique<EagerSubset>(group, std::move(members));
}

}  // namespace torchium::optim::detail
