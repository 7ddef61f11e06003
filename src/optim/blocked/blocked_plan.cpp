#include "optim/blocked/blocked_plan.h"

#include "optim/core/state_checks.h"
#include "support/stream_capture.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <iomanip>
#include <map>
#include <sstream>
#include <string_view>
#include <utility>

namespace torchium::optim::detail {
namespace {

at::Tensor on_meta(const at::Tensor& param) {
  return at::empty_like(param, param.options().device(at::kMeta).requires_grad(false));
}

int64_t total_bytes(const BlockStorage& storage) {
  int64_t bytes = 0;
  for (const auto* tensors : {&storage.statistics, &storage.roots, &storage.root_failures}) {
    for (const at::Tensor& tensor : *tensors) {
      bytes += static_cast<int64_t>(tensor.nbytes());
    }
  }
  return bytes;
}

bool is_out_of_memory(const c10::Error& error) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         std::string_view(error.what_without_backtrace()).find("allocate memory") !=
             std::string_view::npos;
}

std::vector<at::Tensor> params_of(const std::vector<StateEntry*>& entries) {
  std::vector<at::Tensor> params;
  for (const StateEntry* entry : entries) {
    params.push_back(entry->param);
  }
  return params;
}

// Whether the matrices lie as in fresh storage. A step is correct for any layout, but this one
// gives the largest batches, and the same ones after a checkpoint.
bool lie_in_order(const std::vector<SlotPlacement>& layout,
                  const std::vector<StateEntry*>& entries) {
  std::map<int64_t, std::array<const at::Tensor*, 3>> first_of_buffer;
  for (const SlotPlacement& place : layout) {
    const ParameterState& state = entries[place.param]->state;
    const std::array<const at::Tensor*, 3> slot{
        &state.statistics[place.slot], &state.roots[place.slot], &state.root_failures[place.slot]};
    const auto& first = first_of_buffer.try_emplace(place.buffer, slot).first->second;
    for (size_t k = 0; k < slot.size(); ++k) {
      const at::Tensor& tensor = *slot[k];
      const int64_t stride = tensor.numel() / place.count;
      if (!tensor.is_contiguous() || !tensor.is_alias_of(*first[k]) ||
          tensor.storage_offset() != first[k]->storage_offset() + place.start * stride) {
        return false;
      }
    }
  }
  return true;
}

// Whether each tensor has the dtype and device that it has in fresh state.
bool has_types(const ParameterState& state, const ParameterState& fresh, const at::Tensor& param) {
  const NamedTensors needed = fresh.named();
  const auto dtype_of = [&](const std::string& key) {
    const at::Tensor* found = find_tensor(needed, key);
    return found != nullptr          ? found->scalar_type()
           : key.ends_with("_start") ? at::kDouble
                                     : state_dtype(param);
  };
  const NamedTensors tensors = state.named();
  return std::all_of(tensors.begin(), tensors.end(), [&](const auto& entry) {
    return entry.second.scalar_type() == dtype_of(entry.first) &&
           entry.second.device() == param.device();
  });
}

// Copies the values of `old`, also of buffers that `fresh` lacks.
void copy_values(const ParameterState& old, ParameterState& fresh, const at::Tensor& param) {
  for (const StateBuffer& buffer : kStateBuffers) {
    if ((old.*buffer.tensor).defined()) {
      fresh.*buffer.tensor = parameter_shaped_zeros(param);
    }
    if (buffer.start != nullptr && (old.*buffer.start).defined()) {
      fresh.*buffer.start = at::zeros_like(fresh.step);
    }
  }
  const NamedTensors from = old.named(), to = fresh.named();
  for (const auto& [key, tensor] : to) {
    tensor.copy_(*find_tensor(from, key));
  }
}

void start_average(const StateBuffer& buffer, StateEntry& entry, bool is_new) {
  entry.state.*buffer.tensor = parameter_shaped_zeros(entry.param);
  if (buffer.start != nullptr) {
    const at::Tensor& step = entry.state.step;
    entry.state.*buffer.start = is_new ? at::zeros_like(step) : step.clone();
  }
}

void refuse_to_create(c10::Device device) {
  TORCH_CHECK(!torchium::detail::is_capturing(device),
              "a CUDA graph cannot capture this call: state has to be created; run a step before "
              "the capture");
}

}  // namespace

// The state of parameters that have taken no step, and its layout.
struct BlockedPlan::FreshStates {
  std::vector<ParameterState> states;
  std::vector<SlotPlacement> layout;
};

BlockStorage BlockedPlan::allocated_storage(const std::vector<at::Tensor>& params) const {
  try {
    return init_storage(params);
  } catch (const c10::Error& error) {
    if (!is_out_of_memory(error)) {
      throw;
    }
  }
  std::vector<at::Tensor> shapes;
  std::transform(params.begin(), params.end(), std::back_inserter(shapes), on_meta);
  std::ostringstream gib;
  gib << std::setprecision(3)
      << static_cast<double>(total_bytes(init_storage(shapes))) / static_cast<double>(1 << 30);
  const OptionTexts texts = options_of_state(options());
  const auto block_size = std::find_if(
      texts.begin(), texts.end(), [](const auto& option) { return option.first == "block_size"; });
  TORCH_CHECK_WITH(OutOfMemoryError, false, gib.str(), " GiB on ", device().str(),
                   " are needed for the statistics and roots of ", params.size(),
                   " parameters; lower block_size, now ", block_size->second);
}

BlockedPlan::FreshStates BlockedPlan::fresh_states(const std::vector<at::Tensor>& params) const {
  BlockStorage storage = allocated_storage(params);
  FreshStates fresh{std::vector<ParameterState>(params.size()), std::move(storage.layout)};
  if (params.empty()) {
    return fresh;
  }
  const at::Tensor steps =
      at::zeros({static_cast<int64_t>(params.size())},
                params.front().options().dtype(at::kDouble).requires_grad(false));
  for (size_t i = 0; i < params.size(); ++i) {
    fresh.states[i].step = steps.select(0, static_cast<int64_t>(i)).to(params[i].device());
    init_elementwise(params[i], fresh.states[i]);
  }
  for (const SlotPlacement& place : fresh.layout) {
    ParameterState& state = fresh.states[place.param];
    const auto part = [&](const std::vector<at::Tensor>& buffers) {
      return buffers[place.buffer].narrow(0, place.start, place.count);
    };
    state.statistics.push_back(part(storage.statistics));
    state.roots.push_back(part(storage.roots));
    state.root_failures.push_back(part(storage.root_failures));
  }
  return fresh;
}

ParameterState BlockedPlan::planned_state(const at::Tensor& param) const {
  const at::Tensor shape = on_meta(param);
  ParameterState state = std::move(fresh_states({shape}).states.front());
  for (const StateBuffer& buffer : kStateBuffers) {
    if (needs_buffer(buffer)) {
      state.*buffer.tensor = parameter_shaped_zeros(shape);
      if (buffer.start != nullptr) {
        state.*buffer.start = at::empty_like(state.step);
      }
    }
  }
  return state;
}

std::vector<std::string> BlockedPlan::needs() const {
  std::vector<std::string> needs;
  for (const auto& [name, value] : options_of_state(options())) {
    needs.push_back(value);
  }
  for (const StateBuffer& buffer : kStateBuffers) {
    needs.emplace_back(needs_buffer(buffer) ? buffer.key : "");
  }
  return needs;
}

bool BlockedPlan::set_options(const Options& options) {
  const std::vector<std::string> needs_before = needs();
  const double penalty_before = l2_penalty();
  adopt(options);
  const bool fits = needs() == needs_before;
  if (!fits || l2_penalty() != penalty_before) {
    forget_planned();
  }
  return fits;
}

void BlockedPlan::update_preconditioners() {
  std::vector<at::Tensor> params;
  StateList states;
  for (size_t i = 0; i < size(); ++i) {
    if (!state(i).is_empty()) {
      params.push_back(param(i));
      states.push_back(state(i));
    }
  }
  if (params.empty()) {
    return;
  }
  TORCH_CHECK(
      !host_decides() || !torchium::detail::is_capturing(device()),
      "update_preconditioners() cannot be captured in a CUDA graph: it reports failures to the "
      "host. Use Shampoo with capturable=True, and check_errors()");
  const c10::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  renew_roots(params, states, monitor().status());
  monitor().set_root_params(std::make_shared<const std::vector<at::Tensor>>(std::move(params)));
  report();
}

std::vector<BlockUpdate> BlockedPlan::updates() const {
  std::vector<BlockUpdate> updates;
  for (const size_t i : active()) {
    updates.push_back(updates_.empty() ? BlockUpdate() : updates_[i]);
  }
  return updates;
}

void BlockedPlan::renew_roots(const std::vector<at::Tensor>&, const StateList&, at::Tensor) {
  TORCH_INTERNAL_ASSERT(false, "this optimizer has no roots that a call renews");
}

void BlockedPlan::fit(std::vector<StateEntry>& entries) const {
  std::vector<StateEntry*> kept;  // those with state now or afterwards
  for (StateEntry& entry : entries) {
    if (entry.is_active || !entry.state.is_empty()) {
      kept.push_back(&entry);
    }
  }
  if (kept.empty()) {
    return;
  }
  const std::vector<at::Tensor> params = params_of(kept);
  std::vector<at::Tensor> shapes;
  std::transform(params.begin(), params.end(), std::back_inserter(shapes), on_meta);
  const FreshStates needed = fresh_states(shapes);
  std::vector<bool> is_new;
  bool fits = true;
  for (size_t i = 0; i < kept.size(); ++i) {
    is_new.push_back(kept[i]->state.is_empty());
    if (is_new.back()) {
      fits = false;
    } else {
      check_state(*kept[i], needed.states[i]);
      fits = fits && has_types(kept[i]->state, needed.states[i], params[i]);
    }
  }
  // All are laid out together, in the order of the group. The layout then depends only on which
  // parameters have state, so a resumed run continues bit for bit.
  if (!fits || !lie_in_order(needed.layout, kept)) {
    refuse_to_create(device());
    FreshStates fresh = fresh_states(params);
    for (size_t i = 0; i < kept.size(); ++i) {
      if (!is_new[i]) {
        copy_values(kept[i]->state, fresh.states[i], params[i]);
      }
      kept[i]->state = std::move(fresh.states[i]);
    }
  }
  for (size_t i = 0; i < kept.size(); ++i) {
    if (kept[i]->is_active) {
      fit_buffers(*kept[i], is_new[i]);
    }
  }
}

bool BlockedPlan::is_complete(const StateEntry& entry) const {
  return std::all_of(std::begin(kStateBuffers), std::end(kStateBuffers),
                     [&](const StateBuffer& buffer) {
                       const bool is_there = (entry.state.*buffer.tensor).defined();
                       return needs_buffer(buffer) ? is_there && !has_stale_average(entry, buffer)
                                                   : !is_there || buffer.start == nullptr;
                     });
}

// An average keeps the step count at which it begins, also if that is 0: loaders of checkpoints may
// read the keys that a new optimizer has, and no others. An average that is not needed is dropped:
// it would be outdated later.
void BlockedPlan::fit_buffers(StateEntry& entry, bool is_new) const {
  for (const StateBuffer& buffer : kStateBuffers) {
    at::Tensor& tensor = entry.state.*buffer.tensor;
    if (!needs_buffer(buffer)) {
      if (buffer.start != nullptr) {
        tensor.reset();
        (entry.state.*buffer.start).reset();
      }
    } else if (!tensor.defined() || has_stale_average(entry, buffer)) {
      refuse_to_create(device());
      start_average(buffer, entry, is_new);
    }
  }
}

void BlockedPlan::restart_averages(StateEntry& entry) const {
  for (const StateBuffer& buffer : kStateBuffers) {
    if (needs_buffer(buffer) && has_stale_average(entry, buffer)) {
      start_average(buffer, entry, /*is_new=*/false);
    }
  }
}

bool BlockedPlan::has_stale_average(const StateEntry& entry, const StateBuffer& buffer) const {
  return entry.origin && (entry.state.*buffer.tensor).defined() &&
         restarts(buffer, *entry.origin->options);
}

// Throws unless the state is exactly what a parameter of this shape needs with these options.
void BlockedPlan::check_state(const StateEntry& entry, const ParameterState& needed) const {
  ParameterState own = entry.state;
  bool fits = true;
  for (const StateBuffer& buffer : kStateBuffers) {
    at::Tensor& tensor = own.*buffer.tensor;
    fits = fits && (!tensor.defined() || tensor.sizes() == entry.param.sizes());
    tensor.reset();
    if (buffer.start != nullptr) {
      (own.*buffer.start).reset();
    }
  }
  const NamedTensors required = needed.named(), found = own.named();
  fits = fits && required.size() == found.size();
  std::string lost;
  for (const auto& [key, tensor] : required) {
    const at::Tensor* same_key = find_tensor(found, key);
    if (same_key == nullptr) {
      lost += (lost.empty() ? "'" : ", '") + key + "'";
    } else {
      fits = fits && same_key->sizes() == tensor.sizes();
    }
  }
  if (fits && lost.empty()) {
    return;
  }
  const std::string afresh = "delete its entry in the state of the optimizer to start afresh";
  const std::string changes = changes_since(entry);
  TORCH_CHECK_VALUE(changes.empty(), "the state of ", entry.name,
                    " does not fit after the change of ", changes, "; change that back, or ",
                    afresh);
  TORCH_CHECK_VALUE(lost.empty(), "the state of ", entry.name, " has lost ", lost, "; ", afresh);
  std::string texts;
  for (const auto& [name, value] : options_of_state(options())) {
    texts += (texts.empty() ? "" : ", ") + name + "=" + value;
  }
  TORCH_CHECK_VALUE(false, "the state of ", entry.name,
                    " was made for another shape or for other options than ", texts, "; ", afresh);
}

// "block_size from 4 to 2 and its shape from [3] to [4]"
std::string BlockedPlan::changes_since(const StateEntry& entry) const {
  std::string changes;
  const auto add = [&](const std::string& what, const std::string& from, const std::string& to) {
    if (from != to) {
      changes += (changes.empty() ? "" : " and ") + what + " from " + from + " to " + to;
    }
  };
  if (entry.origin) {
    const OptionTexts then = options_of_state(*entry.origin->options);
    const OptionTexts now = options_of_state(options());
    for (size_t i = 0; i < now.size(); ++i) {
      add(now[i].first, then[i].second, now[i].second);
    }
    add("its shape", c10::str(at::IntArrayRef(entry.origin->sizes)), c10::str(entry.param.sizes()));
  }
  return changes;
}

std::vector<ParameterState> BlockedPlan::load(const std::vector<SavedState>& saved) const {
  std::vector<at::Tensor> params;
  for (const SavedState& each : saved) {
    params.push_back(each.param);
  }
  OptionalKeys optional;
  for (const StateBuffer& buffer : kStateBuffers) {
    optional.buffers.emplace_back(buffer.key);
    if (buffer.start != nullptr) {
      optional.counts.push_back(std::string(buffer.key) + "_start");
    }
  }
  std::vector<ParameterState> states = fresh_states(params).states;
  for (size_t i = 0; i < saved.size(); ++i) {
    const auto& [param, name, tensors] = saved[i];
    check_saved_rule(param, ParameterState(*tensors), name);
    states[i] = ParameterState(loaded_state(states[i].named(), *tensors, optional, param, name));
  }
  return states;
}

}  // namespace torchium::optim::detail
