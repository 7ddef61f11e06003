// Scales and shifts of norms by PyTorch operators. Layers with the same options are joined, because
// each has few elements.
#include "optim/blocked/elementwise.h"
#include "optim/core/argument_checks.h"
#include "optim/kfac/factors/factor_averages.h"
#include "optim/kfac/kfac_subset.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace torchium::optim::detail {
namespace {

using Tensors = std::vector<at::Tensor>;

// One parameter of each joined layer: all weights, or all biases.
struct JoinedParameters {
  std::vector<size_t> places;  // in the group
  at::Tensor V, direction;     // [elements]
  StepScalar lr;
};

struct JoinedLayers {
  std::vector<const UnitwiseLayer*> layers;
  std::vector<JoinedParameters> roles;  // weights; biases, if they have any
};

at::Tensor joined(const Tensors& tensors) {
  Tensors vectors;
  for (const at::Tensor& tensor : tensors) {
    vectors.push_back(tensor.reshape(-1));
  }
  return at::cat(vectors);
}

void copy_parts_(Tensors targets, const at::Tensor& joined) {
  Tensors parts;
  int64_t first = 0;
  for (const at::Tensor& target : targets) {
    parts.push_back(joined.narrow(0, first, target.numel()).view(target.sizes()));
    first += target.numel();
  }
  at::_foreach_copy_(targets, parts);
}

// Solves (F + damping I) d = V for all blocks F at once. Divided by their scale, the entries can
// be multiplied in float64 whatever their size.
void solve(JoinedLayers& joined_layers) {
  const UnitwiseLayer& like = *joined_layers.layers.front();
  Tensors all;
  for (const UnitwiseLayer* layer : joined_layers.layers) {
    all.push_back(layer->blocks);
  }
  const at::Tensor F = at::cat(all).to(at::kDouble);
  const double damping = std::max(like.damping, like.floor);
  const auto diagonal = [&](int64_t i) { return F.select(2, i).select(1, i).clamp_min(0.0); };
  const at::Tensor a = diagonal(0);
  auto& weight = joined_layers.roles[0];
  const at::ScalarType dtype = weight.V.scalar_type();
  if (F.size(-1) == 1) {
    weight.direction = (weight.V.to(at::kDouble) / (a + damping)).to(dtype);
    return;
  }
  const at::Tensor c = diagonal(1);
  const at::Tensor s = (a + c).add_(damping).clamp_min_(std::numeric_limits<double>::min());
  const at::Tensor l = damping / s;
  const at::Tensor p = a / s, q = c / s;
  const at::Tensor most = (p * q).sqrt_();  // of |r| (Cauchy and Schwarz)
  const bool has_bias = joined_layers.roles.size() > 1;
  const at::Tensor r =  // without a bias, of the weight alone
      has_bias ? at::maximum(at::minimum(F.select(2, 1).select(1, 0) / s, most), -most)
               : at::zeros_like(most);
  // (p + l)(q + l) - r^2
  const at::Tensor determinant = (most - r) * (most + r) + l * (p + q + l);
  const at::Tensor u = weight.V.to(at::kDouble) / s;
  const at::Tensor v = has_bias ? joined_layers.roles[1].V.to(at::kDouble) / s : at::zeros_like(u);
  weight.direction = (((q + l) * u - r * v) / determinant).to(dtype);
  if (has_bias) {
    auto& bias = joined_layers.roles[1];
    bias.direction = (((p + l) * v - r * u) / determinant).to(bias.V.scalar_type());
  }
}

class UnitwiseSubset : public KfacSubset {
 public:
  UnitwiseSubset(const KfacGroup& group, std::vector<size_t> norms)
      : group_(group), norms_(std::move(norms)) {}

  void update_factors(const KfacRun& run) override {
    for (const size_t l : norms_) {
      const UnitwiseLayer& layer = group_.unitwise[l];
      if (layer.has_sums()) {
        update_averages({{layer.blocks, layer.block_sum, layer.block_scale}}, layer.factor_updates,
                        layer.stat_decay, run.prologue.guard());
      }
    }
  }

  void precondition(const KfacRun& run) override {
    join_layers();
    const FoundInfGuard guard = run.prologue.guard();
    for (JoinedLayers& layers : joined_) {
      for (JoinedParameters& role : layers.roles) {
        const KfacParameterOptions& o = group_.options[role.places[0]];
        Tensors grads;
        for (const size_t i : role.places) {
          grads.push_back(run.grads[i]);
        }
        role.V = signed_gradient(joined(params_of(role)), joined(grads), o.maximize, o.weight_decay,
                                 guard);
        role.lr = guard.learning_rate(o.lr);
      }
      solve(layers);
    }
  }

  std::vector<at::Tensor> directions(size_t) const override { return {}; }  // it has no layer

  at::Tensor kl_terms(const KfacRun&) override {
    Tensors terms;
    for (const JoinedLayers& layers : joined_) {
      for (const JoinedParameters& role : layers.roles) {
        const at::Tensor product = at::dot(role.direction, role.V).to(at::kDouble);
        const at::Tensor& lr = role.lr.device;
        terms.push_back(lr.defined() ? product * lr.to(at::kDouble).square()
                                     : product * role.lr.host * role.lr.host);
      }
    }
    return terms.empty() ? at::Tensor() : at::stack(terms);
  }

  void apply(const KfacRun& run, const StepScalar& nu) override {
    const FoundInfGuard guard = run.prologue.guard();
    for (const JoinedLayers& layers : joined_) {
      for (const JoinedParameters& role : layers.roles) {
        group_.shared.writes_gradients ? write_gradients(role, run, nu) : update(role, nu, guard);
      }
    }
  }

  void end() override { joined_.clear(); }

 private:
  Tensors params_of(const JoinedParameters& role) const {
    Tensors params;
    for (const size_t i : role.places) {
      params.push_back(group_.params[i]);
    }
    return params;
  }

  void update(const JoinedParameters& role, const StepScalar& nu,
              const FoundInfGuard& guard) const {
    const UpdateRule rule{.momentum = group_.options[role.places[0]].momentum,
                          .direction_scale = nu};
    Tensors buffers;
    for (const size_t i : role.places) {
      if (group_.states[i].momentum_buffer.defined()) {
        buffers.push_back(group_.states[i].momentum_buffer);
      }
    }
    at::Tensor param = joined(params_of(role));
    at::Tensor buffer = buffers.empty() ? at::Tensor() : joined(buffers);
    apply_update(rule, role.lr, param, role.direction, buffers.empty() ? nullptr : &buffer, guard);
    copy_parts_(params_of(role), param);
    if (!buffers.empty()) {
      copy_parts_(std::move(buffers), buffer);
    }
  }

  // Entries that are not finite count as zero, and all stop at the largest number of the dtype.
  static void write_gradients(const JoinedParameters& role, const KfacRun& run,
                              const StepScalar& nu) {
    Tensors grads;
    for (const size_t i : role.places) {
      grads.push_back(run.grads[i]);
    }
    at::Tensor grad = joined(grads);
    const double most = largest_number(grad.scalar_type());
    run.prologue.guard().assign_(grad,
                                 finite_entries(nu.multiply(role.direction)).clamp_(-most, most));
    copy_parts_(std::move(grads), grad);
  }

  bool are_alike(const UnitwiseLayer& one, const UnitwiseLayer& other) const {
    const auto params = one.params(), others = other.params();
    const bool same_blocks = one.blocks.size(-1) == other.blocks.size(-1) &&
                             one.damping == other.damping && one.floor == other.floor;
    return same_blocks && std::ranges::equal(params, others, [&](int64_t i, int64_t k) {
             const KfacParameterOptions &o = group_.options[i], &p = group_.options[k];
             return o.lr.is_same(p.lr) && o.momentum == p.momentum &&
                    o.weight_decay == p.weight_decay && o.maximize == p.maximize &&
                    group_.params[i].scalar_type() == group_.params[k].scalar_type() &&
                    group_.states[i].momentum_buffer.defined() ==
                        group_.states[k].momentum_buffer.defined();
           });
  }

  void join_layers() {
    joined_.clear();
    for (const size_t l : norms_) {
      const UnitwiseLayer& layer = group_.unitwise[l];
      auto found = std::ranges::find_if(
          joined_, [&](const auto& each) { return are_alike(*each.layers[0], layer); });
      const auto params = layer.params();
      if (found == joined_.end()) {
        joined_.push_back({{}, std::vector<JoinedParameters>(params.size())});
        found = joined_.end() - 1;
      }
      found->layers.push_back(&layer);
      for (size_t role = 0; role < params.size(); ++role) {
        found->roles[role].places.push_back(static_cast<size_t>(params[role]));
      }
    }
  }

  const KfacGroup& group_;
  std::vector<size_t> norms_;
  std::vector<JoinedLayers> joined_;  // of one step
};

}  // namespace

std::unique_ptr<KfacSubset> make_unitwise_subset(const KfacGroup& group,
                                                 std::vector<size_t> norms) {
  return std::make_unique<UnitwiseSubset>(group, std::move(norms));
}

}  // namespace torchium::optim::detail
