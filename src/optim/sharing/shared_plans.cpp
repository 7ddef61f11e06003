#include "optim/sharing/shared_plans.h"

#include "optim/core/state_checks.h"
#include "optim/sharing/shared_state.h"
#include "support/stream_capture.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace torchium::optim::detail {

c10::Device device_of(const std::vector<BlockedGroup>& groups) {
  for (const BlockedGroup& group : groups) {
    if (!group.params.empty()) {
      return group.params.front().device();
    }
  }
  return at::kCPU;
}

SharedPlans::SharedPlans(std::string optimizer, MakePlan make_plan, MakePlan make_block_plan,
                         std::unique_ptr<SharingRules> rules, distributed::Communicator ranks,
                         SharingOptions options)
    : BlockedPlans(optimizer, std::move(make_plan)),
      rules_(std::move(rules)),
      ranks_(std::move(ranks)),
      sharing_(options),
      owners_(*rules_, ranks_.rank(), ranks_.size()),
      blocks_(optimizer, std::move(make_block_plan)) {
  TORCH_CHECK_VALUE(sharing_.bucket_bytes >= 1,
                    "bucket_bytes must be an integer of at least 1, got ", sharing_.bucket_bytes);
  TORCH_CHECK_VALUE(sharing_.comm_dtype == at::kFloat || sharing_.comm_dtype == at::kBFloat16 ||
                        sharing_.comm_dtype == at::kHalf,
                    "comm_dtype must be float32, bfloat16 or float16, got ", sharing_.comm_dtype);
}

bool SharedPlans::Parameter::is_unchanged() const {
  return param.is_unchanged() &&
         std::ranges::all_of(tensors, [](const SeenTensor& each) { return each.is_unchanged(); });
}

// ---- binding

void SharedPlans::check(const std::vector<BlockedGroup>& groups, Active active) const {
  TORCH_CHECK_VALUE(groups.size() <= distributed::kMostSharedGroups,
                    "an optimizer with a process_group has at most ",
                    distributed::kMostSharedGroups, " parameter groups, got ", groups.size());
  std::optional<c10::Device> device;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t i = 0; i < groups[g].params.size(); ++i) {
      const at::Tensor& param = groups[g].params[i];
      const std::string name = groups[g].name_of(g, i);
      check_parameter(param, name);
      TORCH_CHECK_VALUE(!device || *device == param.device(), name, " is on ", param.device(),
                        " and another on ", *device,
                        "; an optimizer with a process_group needs all parameters on one device");
      device = param.device();
      if (const distributed::ShardedShape* of = groups[g].sharded_shape(i)) {
        const auto sizes =
            distributed::local_sizes(of->shape, of->sharding, ranks_.rank(), of->shape);
        TORCH_CHECK_VALUE(param.sizes() == sizes, name, " has a local tensor of shape ",
                          param.sizes(), " on rank ", ranks_.rank(), "; its placements give ",
                          at::IntArrayRef(sizes));
      }
      if (active == Active::kWithGradient && gradient_of(param).defined()) {
        check_gradient(gradient_of(param), param, name);
      }
    }
  }
}

// One group of each kind and phase for each parameter group, without states.
std::vector<BlockedGroup> SharedPlans::groups_of_blocks() const {
  std::vector<BlockedGroup> groups;
  for (const auto& options : options_) {
    for (size_t kind = 0; kind < rules_->kinds(); ++kind) {
      const auto own_options = rules_->options_of_blocks(*options, kind);
      groups.insert(groups.end(), kPhases, {own_options, {}, {}, {}});
    }
  }
  for (const Parameter& p : parameters_) {
    BlockedGroup& group = groups[group_of_blocks(p)];
    for (const OwnBlock& own : p.own) {
      group.params.push_back(own.tensor);
      group.updates.push_back(update_of(p, own));
    }
  }
  return groups;
}

// Gives the own blocks their states, and returns the shares that these are views of.
std::vector<ParameterState> SharedPlans::split_states(const std::vector<BlockedGroup>& groups,
                                                      Active active,
                                                      std::vector<BlockedGroup>& of_blocks) {
  std::vector<ParameterState> shares(parameters_.size());
  for (size_t k = 0; k < parameters_.size(); ++k) {
    Parameter& p = parameters_[k];
    const ParameterState& state = groups[p.group].states[p.index];
    p.is_active = p.shared != nullptr &&
                  (active == Active::kWithState ? !state.is_empty()
                                                : gradient_of(p.param.tensor()).defined());
    std::vector<ParameterState> states(p.own.size());
    if (!state.is_empty()) {
      shares[k] = share_of(state, *p.shared, ranks_.rank(), names_[k]);
      states = states_of_blocks(shares[k], *p.shared, blocks_of(*p.shared, ranks_.rank()));
    }
    std::ranges::move(states, std::back_inserter(of_blocks[group_of_blocks(p)].states));
  }
  return shares;
}

// The reverse, after the states of the blocks were completed. True if one of them has changed.
bool SharedPlans::join_states(std::vector<ParameterState> before,
                              std::vector<BlockedGroup>& of_blocks) {
  std::vector<size_t> next(of_blocks.size(), 0);
  bool has_changed = false;
  for (size_t k = 0; k < parameters_.size(); ++k) {
    Parameter& p = parameters_[k];
    std::vector<ParameterState*> states;
    for (size_t i = 0; i < p.own.size(); ++i) {
      states.push_back(&of_blocks[group_of_blocks(p)].states[next[group_of_blocks(p)]++]);
    }
    const ParameterState old = std::exchange(before[k], {});
    p.state = {};
    if (p.shared == nullptr || (old.is_empty() && !p.is_active)) {
      continue;
    }
    const at::Tensor& param = p.param.tensor();
    p.state.step = old.is_empty()
                       ? at::zeros({}, param.options().dtype(at::kDouble).requires_grad(false))
                       : old.step.to(device_, at::kDouble);
    has_changed |=
        detail::join_states(states, *p.shared, blocks_of(*p.shared, ranks_.rank()), old,
                            plans_of_groups_[p.group]->planned_state(p.shared->whole), p.state);
  }
  return has_changed;
}

void SharedPlans::remember(const std::shared_ptr<const torch::optim::OptimizerOptions>& options,
                           const std::vector<at::Tensor>& params) {
  for (const at::Tensor& param : params) {
    remembered_.emplace_back(param, options);
  }
}

// As the blocks would know them if they had been stepped with these options.
void SharedPlans::remember_for_blocks() {
  std::unordered_map<const at::TensorImpl*, const torch::optim::OptimizerOptions*> options;
  for (const auto& [param, of_param] : remembered_) {
    options[param.unsafeGetTensorImpl()] = of_param.get();
  }
  for (const Parameter& p : parameters_) {
    const auto found = options.find(p.param.tensor().unsafeGetTensorImpl());
    if (found == options.end() || p.own.empty()) {
      continue;
    }
    const size_t kind = rules_->kind(*found->second, p.shared->whole.sizes());
    std::vector<at::Tensor> blocks;
    for (const OwnBlock& own : p.own) {
      blocks.push_back(own.tensor);
    }
    blocks_.remember(rules_->options_of_blocks(*found->second, kind), blocks);
  }
}

void SharedPlans::bind(std::vector<BlockedGroup>& groups, Active active) {
  const c10::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  check(groups, active);
  TORCH_CHECK(!torchium::detail::is_capturing(device_of(groups)),
              "a CUDA graph cannot capture this call: parameters or their state are new; run a "
              "step before the capture");
  is_new_ = true;
  owners_.share_out(groups);
  lay_out(groups);
  remember_for_blocks();
  std::vector<BlockedGroup> of_blocks = groups_of_blocks();
  std::vector<ParameterState> shares = split_states(groups, active, of_blocks);
  give_gradients([](const Parameter& p) { return p.is_active; });
  blocks_.bind(of_blocks, active);
  if (join_states(std::move(shares), of_blocks)) {
    blocks_.bind(of_blocks, active);
  }
  for (Parameter& p : parameters_) {
    for (const auto& [key, tensor] : p.state.named()) {
      p.tensors.emplace_back(tensor);
    }
    groups[p.group].states[p.index] = p.state;
  }
  remembered_.clear();
  failures_.resize(groups.size());
  skips_in_a_row_.resize(groups.size(), 0);
  hash_setup();
}

void SharedPlans::hash_setup() {
  distributed::Hash hash;
  hash.add(static_cast<int64_t>(sharing_.comm_dtype)).add(sharing_.bucket_bytes);
  for (const auto& options : options_) {
    for (const auto& [name, value] : rules_->all_options(*options)) {
      hash.add(name).add(value);
    }
  }
  for (size_t k = 0; k < parameters_.size(); ++k) {
    const Parameter& p = parameters_[k];
    hash.add(names_[k])
        .add(static_cast<int64_t>(p.group))
        .add(static_cast<int64_t>(p.param.tensor().scalar_type()));
    if (p.shared == nullptr) {
      continue;
    }
    for (const int64_t size : p.shared->whole.sizes()) {
      hash.add(size);
    }
    for (size_t m = 0; m < p.shared->sharding.mesh.size(); ++m) {
      const distributed::Placement& placement = p.shared->sharding.placements[m];
      hash.add(p.shared->sharding.mesh[m])
          .add(p.shared->sharding.strides.empty() ? 0 : p.shared->sharding.strides[m])
          .add(static_cast<int64_t>(placement.kind))
          .add(placement.dim)
          .add(placement.split_factor);
    }
    for (size_t b = 0; b < p.shared->owners.size(); ++b) {
      hash.add(p.shared->owners[b]);
    }
  }
  for (const auto& [dtype, exchange] : exchanges_) {
    for (const Place& place : exchange.gathered_places) {
      hash.add(static_cast<int64_t>(place.stage));
    }
  }
  setup_ = hash.value();
}

bool SharedPlans::set_options(size_t group,
                              std::shared_ptr<const torch::optim::OptimizerOptions> options) {
  if (group >= options_.size()) {
    return false;
  }
  options_[group] = options;
  bool fits = plans_of_groups_[group]->set_options(*options);
  for (size_t kind = 0; kind < rules_->kinds(); ++kind) {
    const auto own_options = rules_->options_of_blocks(*options, kind);
    for (size_t phase = 0; phase < kPhases; ++phase) {
      fits = blocks_.set_options(group_of_blocks(group, kind, phase), own_options) && fits;
    }
  }
  hash_setup();
  return fits;
}

// Whether the host is not to follow the steps.
bool SharedPlans::are_capturable() const {
  const auto count = std::ranges::count_if(
      options_, [&](const auto& options) { return rules_->capturable(*options); });
  if (count == 0) {
    return false;
  }
  TORCH_CHECK_VALUE(count == static_cast<int64_t>(options_.size()),
                    "with a process_group capturable=True must be set in all parameter groups or "
                    "in none; it is set in ",
                    count, " of ", options_.size());
  TORCH_CHECK_VALUE(device_.is_cuda() && ranks_.is_capturable(),
                    "capturable=True with a process_group needs parameters on CUDA devices and the "
                    "backend NCCL, whose collectives a CUDA graph can capture; set "
                    "capturable=False");
  return true;
}

bool SharedPlans::prepare() {
  is_capturable_ = are_capturable();
  bool same_gradients = true;
  for (Parameter& p : parameters_) {
    const at::Tensor& grad = gradient_of(p.param.tensor());
    same_gradients &= std::exchange(p.is_active, grad.defined()) == grad.defined();
    if (p.is_active && (p.state.is_empty() || !p.is_unchanged() || !fits(grad, p.param.tensor()))) {
      return false;
    }
  }
  if (same_gradients) {
    return true;
  }
  // Options may have changed while a parameter had no gradient: its state is then incomplete.
  give_gradients([](const Parameter& p) { return p.is_active; });
  return blocks_.prepare();
}

// Gives the own blocks of these parameters their gradients; the others have none.
void SharedPlans::give_gradients(const std::function<bool(const Parameter&)>& has_gradient) {
  for (Parameter& p : parameters_) {
    const bool given = has_gradient(p);
    for (OwnBlock& own : p.own) {
      own.tensor.mutable_grad() = given ? own.gradient : at::Tensor();
    }
  }
}

bool SharedPlans::has_all_states() const {
  return blocks_.has_all_states() &&
         std::ranges::all_of(parameters_, [](const Parameter& p) { return p.is_unchanged(); });
}

}  // namespace torchium::optim::detail
