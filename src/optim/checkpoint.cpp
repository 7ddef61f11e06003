// Archives of the optimizers: libtorch's format, checked as a whole before anything is loaded.
#include "optim/group_runtime.h"
#include "optim/group_step.h"
#include "optim/stacks.h"
#include "optim/state_stacks.h"
#include "torchium/optim/second_order_optimizer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>
#include <torch/optim/serialize.h>

#include <unordered_map>
#include <utility>

namespace torchium::optim {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

template <typename Value>
Value read(InputArchive& archive, const std::string& key) {
  Value value;
  TORCH_CHECK_VALUE(archive.try_read(key, value), "the archive has no entry '", key,
                    "'; it was not written by an optimizer of Torchium");
  return value;
}

// Slots are numbered: "statistics.0", "statistics.1", ...
std::vector<at::Tensor> read_slots(InputArchive& archive, const std::string& key) {
  std::vector<at::Tensor> slots;
  at::Tensor slot;
  while (archive.try_read(key + "." + std::to_string(slots.size()), slot, /*is_buffer=*/true)) {
    slots.push_back(std::move(slot));
    slot = at::Tensor();
  }
  return slots;
}

// One parameter group of an archive.
struct SavedGroup {
  std::vector<std::string> params;  // keys of the states
  InputArchive options;
};

std::vector<SavedGroup> read_groups(InputArchive& archive) {
  auto groups_archive = read<InputArchive>(archive, "param_groups");
  std::vector<SavedGroup> groups;
  const auto group_count = read<at::Tensor>(groups_archive, "param_groups/size").item<int64_t>();
  for (const auto group : c10::irange(group_count)) {
    auto group_archive =
        read<InputArchive>(groups_archive, "param_groups/" + std::to_string(group));
    SavedGroup saved;
    const auto count = read<at::Tensor>(group_archive, "params/size").item<int64_t>();
    for (const auto i : c10::irange(count)) {
      const auto key = read<c10::IValue>(group_archive, "params/" + std::to_string(i));
      saved.params.push_back(key.toStringRef());
    }
    saved.options = read<InputArchive>(group_archive, "options");
    groups.push_back(std::move(saved));
  }
  return groups;
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> MatrixParamState::tensors() const {
  std::vector<std::pair<std::string, at::Tensor>> result;
  const auto add = [&](const std::string& key, const at::Tensor& tensor) {
    if (tensor.defined()) {
      result.emplace_back(key, tensor);
    }
  };
  const auto add_slots = [&](const std::string& key, const std::vector<at::Tensor>& slots) {
    for (const auto slot : c10::irange(slots.size())) {
      add(key + "." + std::to_string(slot), slots[slot]);
    }
  };
  add("step", step());
  add_slots("statistics", statistics());
  add_slots("roots", roots());
  add_slots("root_failures", root_failures());
  // parameter_shaped() gives addresses for writing too; nothing is written here.
  for (const auto& [key, tensor] : const_cast<MatrixParamState*>(this)->parameter_shaped()) {
    add(key, *tensor);
  }
  return result;
}

void MatrixParamState::serialize(OutputArchive& archive) const {
  for (const auto& [key, tensor] : tensors()) {
    archive.write(key, tensor.clone(), /*is_buffer=*/true);
  }
}

void MatrixParamState::serialize(InputArchive& archive) {
  TORCH_CHECK_VALUE(archive.try_read("step", step(), /*is_buffer=*/true),
                    "the archive has no step count of a parameter; it was not written by an "
                    "optimizer of Torchium");
  statistics(read_slots(archive, "statistics"));
  roots(read_slots(archive, "roots"));
  root_failures(read_slots(archive, "root_failures"));
  for (const auto& [key, tensor] : parameter_shaped()) {
    archive.try_read(key, *tensor, /*is_buffer=*/true);
  }
}

void SecondOrderOptimizer::save(OutputArchive& archive) const {
  // The members that differ between optimizers are virtual, so their bases are enough.
  torch::optim::serialize<torch::optim::OptimizerParamState, torch::optim::OptimizerOptions>(
      archive, *this);
}

void SecondOrderOptimizer::load(InputArchive& archive) {
  const at::NoGradGuard no_grad;
  auto saved_groups = read_groups(archive);
  TORCH_CHECK_VALUE(saved_groups.size() == param_groups_.size(), "the archive has ",
                    saved_groups.size(), " parameter groups, but the optimizer has ",
                    param_groups_.size());
  auto states_archive = read<InputArchive>(archive, "state");

  std::vector<std::unique_ptr<Options>> options;
  std::vector<std::vector<std::unique_ptr<MatrixParamState>>> states;
  for (const auto group : c10::irange(saved_groups.size())) {
    auto& saved = saved_groups[group];
    const size_t param_count = param_groups_[group].params().size();
    TORCH_CHECK_VALUE(saved.params.size() == param_count, "group ", group, " of the archive has ",
                      saved.params.size(), " parameters, but that of the optimizer has ",
                      param_count);
    options.push_back(defaults().clone());
    options.back()->serialize(saved.options);
    check_options(*options.back());
    std::vector<std::unique_ptr<MatrixParamState>> loaded(param_count);
    for (const auto i : c10::irange(param_count)) {
      InputArchive state_archive;
      if (states_archive.try_read(saved.params[i], state_archive)) {
        loaded[i] = make_empty_state();
        loaded[i]->serialize(state_archive);
      }
    }
    states.push_back(fit_states(group, *options.back(), std::move(loaded)));
  }

  // Everything fits: from here on nothing throws.
  state_.clear();
  runtimes_->clear();
  for (const auto group : c10::irange(param_groups_.size())) {
    param_groups_[group].set_options(std::move(options[group]));
    for (const auto i : c10::irange(states[group].size())) {
      if (states[group][i] != nullptr) {
        state_[param_groups_[group].params()[i].unsafeGetTensorImpl()] =
            std::move(states[group][i]);
      }
    }
  }
}

std::vector<std::unique_ptr<MatrixParamState>> SecondOrderOptimizer::fit_states(
    size_t group, const Options& options,
    std::vector<std::unique_ptr<MatrixParamState>> loaded) const {
  std::vector<std::unique_ptr<MatrixParamState>> fitted(loaded.size());
  std::vector<at::Tensor> params;
  std::vector<MatrixParamState*> states;
  for (const auto i : c10::irange(loaded.size())) {
    if (loaded[i] == nullptr) {
      continue;
    }
    const at::Tensor& param = param_groups_[group].params()[i];
    const std::string name = describe(param);
    fitted[i] = make_empty_state();
    init_parameter_shaped(options, param, *fitted[i]);
    const auto sources = loaded[i]->parameter_shaped();
    const auto targets = fitted[i]->parameter_shaped();
    for (const auto k : c10::irange(targets.size())) {
      const auto& [key, source] = sources[k];
      if (source->defined()) {
        at::Tensor target = detail::parameter_shaped_zeros(param);
        detail::check_fits(*source, target, key, name);
        *targets[k].second = target.copy_(*source);
      } else {
        TORCH_CHECK_VALUE(!targets[k].second->defined(), "the archive has no ", key, " of ", name);
      }
    }
    at::Tensor step = at::zeros({}, at::TensorOptions(at::kFloat).device(param.device()));
    detail::check_fits(loaded[i]->step(), step, "step", name);
    fitted[i]->step(step.copy_(loaded[i]->step()));
    fitted[i]->statistics(loaded[i]->statistics());
    fitted[i]->roots(loaded[i]->roots());
    fitted[i]->root_failures(loaded[i]->root_failures());
    params.push_back(param);
    states.push_back(fitted[i].get());
  }
  // Copies the matrices, so that nothing aliases the archive.
  detail::move_into_stacks(init_stacks(options, params), states,
                           [&](size_t i) { return describe(params[i]); });
  return fitted;
}

}  // namespace torchium::optim
