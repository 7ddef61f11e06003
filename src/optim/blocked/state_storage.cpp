#include "optim/blocked/state_storage.h"

#include "optim/core/state_checks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {
namespace {

// Views of storage, one a slot of one parameter.
struct Slots {
  std::vector<at::Tensor> statistics;
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> root_failures;
};

std::vector<Slots> slot_views(const BlockStorage& storage, size_t param_count) {
  std::vector<Slots> slots(param_count);
  for (const auto& place : storage.layout) {
    auto& [statistics, roots, root_failures] = slots[place.param];
    statistics.push_back(storage.statistics[place.buffer].narrow(0, place.start, place.count));
    roots.push_back(storage.roots[place.buffer].narrow(0, place.start, place.count));
    root_failures.push_back(
        storage.root_failures[place.buffer].narrow(0, place.start, place.count));
  }
  return slots;
}

void check_slots(const std::vector<at::Tensor>& values, const std::vector<at::Tensor>& needed,
                 const std::string& key, const std::string& param) {
  TORCH_CHECK_VALUE(values.size() == needed.size(), key, " of ", param, " has ", values.size(),
                    " slots, but the optimizer's options and the parameter's shape need ",
                    needed.size());
  for (size_t slot = 0; slot < values.size(); ++slot) {
    check_fits(values[slot], needed[slot], key + "." + std::to_string(slot), param);
  }
}

void copy_slots(const std::vector<at::Tensor>& values, const std::vector<at::Tensor>& slots) {
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    slots[slot].copy_(values[slot]);
  }
}

}  // namespace

bool slots_fit(const BlockStorage& storage, const MatrixParamState& state) {
  const Slots needed = slot_views(storage, 1).front();
  const auto fit = [](const std::vector<at::Tensor>& values, const std::vector<at::Tensor>& like) {
    return std::equal(
        values.begin(), values.end(), like.begin(), like.end(),
        [](const at::Tensor& a, const at::Tensor& b) { return a.sizes() == b.sizes(); });
  };
  return fit(state.statistics(), needed.statistics) && fit(state.roots(), needed.roots) &&
         fit(state.root_failures(), needed.root_failures);
}

void move_into_storage(const BlockStorage& storage, const std::vector<MatrixParamState*>& states,
                       const ParamNames& names) {
  std::vector<Slots> slots = slot_views(storage, states.size());
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i]->step().defined()) {
      const std::string param = names(i);
      check_slots(states[i]->statistics(), slots[i].statistics, "statistics", param);
      check_slots(states[i]->roots(), slots[i].roots, "roots", param);
      check_slots(states[i]->root_failures(), slots[i].root_failures, "root_failures", param);
    }
  }
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i]->step().defined()) {
      copy_slots(states[i]->statistics(), slots[i].statistics);
      copy_slots(states[i]->roots(), slots[i].roots);
      copy_slots(states[i]->root_failures(), slots[i].root_failures);
    }
    states[i]->statistics(std::move(slots[i].statistics));
    states[i]->roots(std::move(slots[i].roots));
    states[i]->root_failures(std::move(slots[i].root_failures));
  }
}

}  // namespace torchium::optim::detail
