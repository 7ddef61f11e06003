// What the ranks that share a step of K-FAC agree on, who makes which inverses, and the state of
// all ranks together.
#include "distributed/ownership.h"
#include "optim/kfac/kfac_plan.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {
namespace {

using distributed::Hash;

void add_sizes(Hash& hash, const at::Tensor& tensor) {
  hash.add(tensor.defined() ? tensor.dim() : -1);
  if (tensor.defined()) {
    for (const int64_t size : tensor.sizes()) {
      hash.add(size);
    }
  }
}

// What a rank has of the inverses of a layer.
enum Kept : int64_t { kNone, kInverses, kEigensystems };

Kept kept(const KFACParamState& state) {
  return state.A_inverse().defined()        ? kInverses
         : state.A_eigenvectors().defined() ? kEigensystems
                                            : kNone;
}

}  // namespace

void check_grad_workers(double fraction, bool ekfac) {
  TORCH_CHECK_VALUE(fraction > 0.0 && fraction <= 1.0,
                    "grad_worker_fraction must be a number above 0 and at most 1, got ", fraction);
  TORCH_CHECK_VALUE(!ekfac || fraction == 1.0,
                    "ekfac=True needs the eigenvectors of all layers on all ranks, where their "
                    "samples are, got grad_worker_fraction=",
                    fraction, "; use grad_worker_fraction=1");
}

void KfacPlan::share_with(std::shared_ptr<const distributed::Communicator> ranks) {
  JointPlan::share_with(std::move(ranks));
  set_grad_worker_fraction(grad_worker_fraction_);
}

void KfacPlan::set_grad_worker_fraction(double fraction) {
  check_grad_workers(fraction, /*ekfac=*/false);
  grad_worker_fraction_ = fraction;
  groups_ = is_shared() ? WorkerGroups(ranks().size(), fraction) : WorkerGroups();
}

// Throws c10::ValueError for options that ranks without the inverses of all layers do not allow.
void KfacPlan::check_sharing() const {
  if (groups_.groups() > 1) {
    check_grad_workers(grad_worker_fraction_, options().front().ekfac());
  }
}

// ---- owners

// The rank with the least work so far, most expensive layers first. A layer keeps its owner as
// long as its weight is bound.
void KfacPlan::choose_owners(std::vector<Layer>& layers) const {
  if (!is_shared()) {
    return;
  }
  std::vector<int64_t> load(static_cast<size_t>(groups_.ranks()), 0);
  for (const auto i : c10::irange(size())) {
    const auto found = owners_.find(param(i).unsafeGetTensorImpl());
    if (found != owners_.end()) {
      load[found->second.owner] += found->second.cost;
    }
  }
  std::vector<Layer*> without;
  std::vector<distributed::Block> blocks;
  for (Layer& layer : layers) {
    const auto found = owners_.find(param(layer.weight).unsafeGetTensorImpl());
    if (found != owners_.end()) {
      layer.owner = found->second.owner;
    } else if (!layer.is_unitwise) {
      without.push_back(&layer);
      blocks.push_back({.param = 0, .rectangle = {}, .slot = -1, .cost = layer.cost});
    }
  }
  const std::vector<std::vector<distributed::Source>> anywhere(1);
  const auto owners =
      distributed::assign_owners(blocks, anywhere, groups_.ranks(), std::move(load));
  for (const auto k : c10::irange(without.size())) {
    without[k]->owner = owners[k];
  }
}

bool KfacPlan::keeps_inverses(const Layer& layer) const {
  return !is_shared() || groups_.are_together(ranks().rank(), layer.owner);
}

void KfacPlan::assign_work(const Layer& of, KfacLayer& layer) const {
  layer.owner = of.owner;
  layer.inverts = !is_shared() || of.owner == ranks().rank();
  layer.preconditions = keeps_inverses(of);
}

std::shared_ptr<LayerExchange> KfacPlan::make_exchange(DampingSplit split) const {
  return is_shared() ? std::make_shared<LayerExchange>(ranks(), groups_, split) : nullptr;
}

// ---- the agreement

void KfacPlan::add_to_setup(Hash& hash) const {
  JointPlanOf::add_to_setup(hash);
  hash.add(groups_.groups());
}

bool KfacPlan::is_lost(const Layer& layer) const {
  return layer.has_factors && !layer.is_unitwise &&
         lost_inverses_.count(param(layer.weight).unsafeGetTensorImpl()) != 0;
}

void KfacPlan::add_layers(distributed::StepFindings& findings) {
  findings.layers.assign(size(), 0);
  const auto taken = steps_taken();
  Hash counts;
  for (const Layer& each : layers_) {
    Hash hash;
    hash.add(each.bias)
        .add(int64_t{each.is_transposed})
        .add(int64_t{each.is_unitwise})
        .add(int64_t{each.has_factors})
        .add(each.owner)
        .add(taken[each.weight]);
    if (each.sums != nullptr) {
      const FactorSums& sums = *each.sums;
      counts.add(sums.samples()).add(sums.rows);
      hash.add(int64_t{sums.A_is_of_gradients}).add(int64_t{sums.is_of_table});
      for (const at::Tensor& tensor :
           {sums.A, sums.G, sums.blocks, sums.moments, sums.lookup_A, sums.lookup_counts}) {
        add_sizes(hash, tensor);
      }
    }
    // Even and positive, or odd with samples.
    findings.layers[each.weight] =
        static_cast<int64_t>(hash.value() >> 3) * 2 + (each.sums != nullptr ? 1 : 2);
    findings.renews |= is_lost(each);
  }
  findings.counts = counts.value();
}

// The layers are the same on all ranks.
void KfacPlan::take_findings(const distributed::StepFindings& findings) {
  same_counts_ = findings.same_counts;
  for (const Layer& each : layers_) {
    if (is_shared() && !each.is_unitwise) {
      owners_[param(each.weight).unsafeGetTensorImpl()] = {each.owner, each.cost};
    }
  }
  if (!findings.renews) {
    return;
  }
  std::vector<int64_t> lost;
  for (const Layer& each : layers_) {
    lost.push_back(is_lost(each) ? 1 : 0);
  }
  lost = ranks().all_reduce_max(lost);
  for (const auto k : c10::irange(layers_.size())) {
    if (lost[k] != 0) {
      lost_inverses_.insert(param(layers_[k].weight).unsafeGetTensorImpl());
    }
  }
}

// ---- the whole state

bool KfacPlan::has_parts() const { return groups_.groups() > 1 && size() > 0; }

bool KfacPlan::lacks_inverses() const {
  for (const auto i : c10::irange(size())) {
    if (state_of(i).A().defined() && kept(state_of(i)) == kNone) {
      return true;
    }
  }
  return false;
}

KfacPlan::States KfacPlan::whole_states() const {
  std::vector<const KFACParamState*> states;
  for (const auto i : c10::irange(size())) {
    states.push_back(state_of(i).step().defined() ? &state_of(i) : nullptr);
  }
  return whole_states(states);
}

KfacPlan::States KfacPlan::whole_states(const std::vector<const KFACParamState*>& states) const {
  const c10::DeviceGuard device_guard(device());
  distributed::StepFindings findings = distributed::findings_of_call("state_dict()");
  std::vector<std::string> names;
  std::vector<int64_t> own;
  for (const auto i : c10::irange(states.size())) {
    own.push_back(states[i] == nullptr ? kNone : kept(*states[i]));
    Hash factors;
    factors.add(int64_t{states[i] != nullptr});
    if (states[i] != nullptr) {
      add_sizes(factors, states[i]->A());
      add_sizes(factors, states[i]->G());
    }
    findings.layers.push_back(static_cast<int64_t>(factors.value() >> 3) * 2 + 2);
    names.push_back(name(i));
  }
  distributed::agree(findings, ranks(), names);
  const auto of_ranks = ranks().all_gather(own);
  States whole(states.size());
  for (const auto i : c10::irange(states.size())) {
    if (states[i] == nullptr) {
      continue;
    }
    whole[i] = std::make_unique<KFACParamState>(*states[i]);
    KFACParamState& state = *whole[i];
    const auto with =
        std::ranges::find_if(of_ranks, [&](const auto& of_rank) { return of_rank[i] != kNone; });
    if (with == of_ranks.end() || !state.A().defined()) {
      continue;
    }
    const bool is_own = with - of_ranks.begin() == ranks().rank();
    const auto options = at::TensorOptions(state_dtype(param(i))).device(state.A().device());
    std::vector<at::Tensor> tensors;
    const auto gather = [&](at::Tensor& root, at::IntArrayRef sizes) {
      root = is_own && root.defined() ? root.clone(at::MemoryFormat::Contiguous)
                                      : at::zeros(sizes, options);
      tensors.push_back(root);
    };
    const bool exact = (*with)[i] == kEigensystems;
    gather(exact ? state.A_eigenvectors() : state.A_inverse(), state.A().sizes());
    gather(exact ? state.G_eigenvectors() : state.G_inverse(), state.G().sizes());
    if (exact) {
      gather(state.A_eigenvalues(), state.A().sizes().slice(0, 2));
      gather(state.G_eigenvalues(), state.G().sizes().slice(0, 2));
    }
    ranks().combine_(tensors);
  }
  return whole;
}

}  // namespace torchium::optim::detail
