#include "optim/blocked/elementwise.h"
#include "optim/core/argument_checks.h"
#include "optim/kfac/factors/factor_averages.h"
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
      if (group_.layers[l].has_sums() && !group_.layers[l].is_inverse_free()) {
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
    precondition_layers();
    find_learning_rates(guard);
  }

  Tensors directions(size_t l) const override {
    Tensors all;
    for (const int64_t i : group_.layers[l].params()) {
      all.push_back(directions_[i]);
    }
    return all;
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
    update_averages({{layer.A, layer.A_sum, layer.A_scale}, {layer.G, layer.G_sum, layer.G_scale}},
                    layer.factor_updates, layer.stat_decay, guard);
    if (layer.moment_sum.defined()) {  // in no basis before the first eigensystem
      update_averages({{layer.second_moments, layer.moment_sum, layer.moment_scale}},
                      layer.moment_updates, layer.stat_decay,
                      guard.narrowed(layer.G_eigenvalues.ge(0).all()));
    }
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

  void precondition_layers() {
    std::vector<const KfacLayer*> layers;
    std::vector<LayerTensors> V;
    for (const size_t l : members_.layers) {
      const KfacLayer& layer = group_.layers[l];
      if (!layer.preconditions) {
        for (const int64_t i : layer.params()) {
          directions_[i] = at::empty(V_[i].sizes(), V_[i].options());
        }
        continue;
      }
      layers.push_back(&layer);
      V.push_back({V_[layer.weight], layer.bias < 0 ? at::Tensor() : V_[layer.bias]});
    }
    const DampingSplit split = group_.shared.damping_split;
    const bool joins =
        !layers.empty() && !layers[0]->factor_updates.is_cpu();  // copies take longer on a CPU
    const auto directions = joins ? kfac_directions(layers, split, V) : std::vector<LayerTensors>();
    for (size_t k = 0; k < layers.size(); ++k) {
      const LayerTensors d = joins ? directions[k] : kfac_direction(*layers[k], split, V[k]);
      // As where they are received: loops over other strides may round differently.
      const auto stored = [&](const at::Tensor& direction) {
        return group_.exchange ? direction.contiguous() : direction;
      };
      directions_[layers[k]->weight] = stored(d.weight);
      if (layers[k]->bias >= 0) {
        directions_[layers[k]->bias] = stored(d.bias);
      }
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
