// What SharedPlans reports, and the states of checkpoints.
#include "optim/core/found_inf_guard.h"
#include "optim/sharing/shared_plans.h"
#include "optim/sharing/shared_state.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {

int64_t SharedPlans::host_steps(const at::Tensor& param) const {
  for (const Parameter& p : parameters_) {
    if (p.param.tensor().is_same(param) && !p.state.is_empty() && p.state.step.is_cpu()) {
      return static_cast<int64_t>(count_on_cpu(p.state.step));
    }
  }
  return -1;
}

GroupMemory SharedPlans::memory(size_t group, TensorBytes& counted) const {
  GroupMemory memory;
  for (size_t kind = 0; kind < rules_->kinds(); ++kind) {
    for (size_t phase = 0; phase < kPhases; ++phase) {
      memory += blocks_.memory(group_of_blocks(group, kind, phase), counted);
    }
  }
  return memory;
}

// Throws if an option has changed since the state was shared out that the state does not follow.
void SharedPlans::check_states(const BlockedGroup& group, size_t g) const {
  const auto plan = plan_of(group);
  for (size_t i = 0; i < group.params.size(); ++i) {
    const ParameterState& state = group.states[i];
    if (state.is_empty() || owners_.find(group.params[i]) == nullptr) {
      continue;
    }
    const ParameterState planned = plan->planned_state(group.whole(i));
    const auto has_shape = [](const at::Tensor& share, const at::Tensor& whole) {
      return share.sizes().slice(1) == whole.sizes().slice(1);
    };
    if (!std::ranges::equal(state.statistics, planned.statistics, has_shape)) {
      refuse_other_blocks(group.name_of(g, i));
    }
  }
}

// What follows exchanges tensors of the same shapes.
void SharedPlans::agree_on_states(const std::vector<BlockedGroup>& groups, bool as_shares) {
  const c10::NoGradGuard no_grad;
  check_not_broken();
  StepFindings findings = distributed::findings_of_call("state_dict()");
  distributed::Hash hash;
  hash.add(findings.call).add(static_cast<int64_t>(as_shares));
  for (const BlockedGroup& group : groups) {
    const auto plan = plan_of(group);
    hash.add(static_cast<int64_t>(group.params.size()));
    for (size_t i = 0; i < group.params.size(); ++i) {
      const at::Tensor whole = group.whole(i);
      const ParameterState planned = plan->planned_state(whole);
      hash.add(c10::str(whole.scalar_type(), whole.sizes()));
      for (const at::Tensor& statistics : planned.statistics) {
        hash.add(c10::str(statistics.sizes()));
      }
    }
  }
  findings.setup = hash.value();
  HeldError held;
  for (size_t g = 0; g < groups.size(); ++g) {
    held.run([&] {
      owners_.share_out_given(groups[g], g);
      check_states(groups[g], g);
    });
  }
  findings.has_error = held.is_set();
  const c10::Device device = device_of(groups);
  const c10::DeviceGuard device_guard(device);
  agree(findings, ranks_, {}, device);
  held.raise();
}

// All ranks must call it. Empty for parameters whose state this rank has whole: frozen ones, and
// those that were just loaded.
std::vector<ParameterState> SharedPlans::whole_frames(size_t g, const BlockedGroup& group) {
  std::vector<int64_t> presence;
  for (const ParameterState& state : group.states) {
    const auto of_param = presence_of(state);
    presence.insert(presence.end(), of_param.begin(), of_param.end());
  }
  for (size_t i = 0; i < group.params.size(); ++i) {
    const bool has_state = !group.states[i].is_empty();
    const bool is_shared = owners_.find(group.params[i]) != nullptr;
    presence.insert(presence.end(),
                    {has_state && is_shared ? 1 : 0, has_state && !is_shared ? 1 : 0});
  }
  presence = ranks_.all_reduce_max(presence);
  std::vector<ParameterState> frames(group.params.size());
  const auto plan = plan_of(group);
  for (size_t i = 0; i < group.params.size(); ++i) {
    const auto kinds =
        presence.begin() + static_cast<std::ptrdiff_t>(group.params.size() * kPresence + 2 * i);
    TORCH_CHECK(kinds[0] == 0 || kinds[1] == 0, "the state of ", group.name_of(g, i),
                " is whole on some ranks of the process group and shared out on others; call "
                "load_state_dict() on all ranks, with the same state dict");
    if (const SharedBlocks* shared = owners_.find(group.params[i])) {
      const auto first = presence.begin() + static_cast<std::ptrdiff_t>(i * kPresence);
      frames[i] = whole_frame(group.states[i], plan->planned_state(group.whole(i)), *shared,
                              {first, first + kPresence});
    }
  }
  return frames;
}

std::vector<ParameterState> SharedPlans::whole_states(size_t g, const BlockedGroup& group) {
  const c10::NoGradGuard no_grad;
  const c10::Device device = group.params.empty() ? device_ : group.params.front().device();
  const c10::DeviceGuard device_guard(device);
  std::vector<ParameterState> states = whole_frames(g, group);
  for (size_t i = 0; i < group.params.size(); ++i) {
    const SharedBlocks* shared = owners_.find(group.params[i]);
    states[i] = shared == nullptr ? group.states[i]
                                  : whole_state(group.states[i], states[i], *shared, ranks_);
  }
  return states;
}

std::vector<BlockedPlans::SharePlaces> SharedPlans::share_places(size_t g,
                                                                 const BlockedGroup& group) {
  const c10::NoGradGuard no_grad;
  const c10::DeviceGuard device_guard(device_);
  std::vector<ParameterState> frames = whole_frames(g, group);
  std::vector<SharePlaces> places(frames.size());
  for (size_t i = 0; i < frames.size(); ++i) {
    const SharedBlocks* shared = owners_.find(group.params[i]);
    if (shared == nullptr) {
      continue;
    }
    places[i] = {
        .whole = std::move(frames[i]), .dims = shared->dims, .blocks = {}, .is_share = true};
    for (const size_t b : blocks_of(*shared, ranks_.rank())) {
      places[i].blocks.push_back(
          {shared->blocks[b].slot, shared->matrices[b], shared->blocks[b].rectangle});
    }
  }
  return places;
}

}  // namespace torchium::optim::detail
