// Archives of the optimizers, in libtorch's format. Everything is checked before anything is
// loaded.
#include "optim/core/parameter_state.h"
#include "torchium/optim/second_order_optimizer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>
#include <torch/optim/serialize.h>

#include <algorithm>
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

// Groups with a state other than that of their optimizer.
class Saved : public torch::optim::Optimizer {
 public:
  Saved(const std::vector<torch::optim::OptimizerParamGroup>& groups,
        std::unique_ptr<torch::optim::OptimizerOptions> defaults,
        std::decay_t<decltype(state_)> state)
      : Optimizer(groups, std::move(defaults)) {
    state_ = std::move(state);
  }
  at::Tensor step(LossClosure) override { return {}; }
};

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

std::vector<SecondOrderParamState::NamedTensor> SecondOrderParamState::members() {
  std::vector<NamedTensor> all{{"step", &step()}};
  for (const auto& more : {counts(), parameter_shaped()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

std::vector<std::pair<std::string, at::Tensor>> SecondOrderParamState::tensors() const {
  std::vector<std::pair<std::string, at::Tensor>> result;
  // These give addresses for writing; nothing is written here.
  auto& self = const_cast<SecondOrderParamState&>(*this);
  for (const auto& [key, tensor] : self.members()) {
    if (tensor->defined()) {
      result.emplace_back(key, *tensor);
    }
  }
  for (const auto& [name, list] : self.lists()) {
    for (const auto i : c10::irange(list->size())) {
      if ((*list)[i].defined()) {
        result.emplace_back(name + "." + std::to_string(i), (*list)[i]);
      }
    }
  }
  return result;
}

bool SecondOrderParamState::assign(const std::string& key, const at::Tensor& value) {
  for (const auto& [name, tensor] : members()) {
    if (name == key) {
      *tensor = value;
      return true;
    }
  }
  for (const auto& [name, list] : lists()) {
    if (const auto i = detail::index_in_list(key, name)) {
      list->resize(std::max(list->size(), *i + 1));
      (*list)[*i] = value;
      while (!list->empty() && !list->back().defined()) {
        list->pop_back();
      }
      return true;
    }
  }
  return false;
}

bool SecondOrderParamState::has_tensors_of(const SecondOrderParamState& other) const {
  const auto own = tensors();
  const auto others = other.tensors();
  return std::equal(own.begin(), own.end(), others.begin(), others.end(),
                    [](const auto& a, const auto& b) {
                      return a.first == b.first && a.second.is_same(b.second);
                    });
}

bool SecondOrderParamState::is_of(const at::Tensor& param) {
  const auto dtype = detail::state_dtype(param);
  const auto shaped = parameter_shaped();
  return step().device() == param.device() && step().scalar_type() == at::kDouble &&
         std::all_of(shaped.begin(), shaped.end(), [&](const NamedTensor& member) {
           const at::Tensor& tensor = *member.second;
           return !tensor.defined() ||
                  (tensor.scalar_type() == dtype && tensor.device() == param.device());
         });
}

void SecondOrderParamState::convert_to(const at::Tensor& param) {
  step(step().to(param.device(), at::kDouble));
  for (const auto& [key, tensor] : counts()) {
    *tensor = tensor->defined() ? tensor->to(param.device()) : *tensor;
  }
  for (const auto& [key, tensor] : parameter_shaped()) {
    *tensor = tensor->defined() ? tensor->to(param.device(), detail::state_dtype(param)) : *tensor;
  }
}

void SecondOrderParamState::serialize(OutputArchive& archive) const {
  for (const auto& [key, tensor] : tensors()) {
    archive.write(key, tensor.clone(), /*is_buffer=*/true);
  }
}

void SecondOrderParamState::serialize(InputArchive& archive) {
  for (const std::string& key : archive.keys()) {
    at::Tensor tensor;  // a defined one would be written to
    if (archive.try_read(key, tensor, /*is_buffer=*/true)) {
      assign(key, tensor);
    }
  }
  TORCH_CHECK_VALUE(step().defined(),
                    "the archive has no step count of a parameter; it was not written by an "
                    "optimizer of Torchium");
}

void SecondOrderOptimizer::save(OutputArchive& archive) const {
  refuse_moved_from();
  // Members that differ between optimizers are virtual, so the base classes suffice.
  const auto write = [&](const torch::optim::Optimizer& optimizer) {
    torch::optim::serialize<torch::optim::OptimizerParamState, torch::optim::OptimizerOptions>(
        archive, optimizer);
  };
  if (auto whole = whole_state()) {
    write(Saved(param_groups_, defaults_->clone(), std::move(*whole)));
  } else {
    write(*this);
  }
  save_more(archive);
}

void SecondOrderOptimizer::load(InputArchive& archive) {
  refuse_moved_from();
  const at::NoGradGuard no_grad;
  auto saved_groups = read_groups(archive);
  TORCH_CHECK_VALUE(saved_groups.size() == param_groups_.size(), "the archive has ",
                    saved_groups.size(), " parameter groups, but the optimizer has ",
                    param_groups_.size());
  auto states_archive = read<InputArchive>(archive, "state");

  std::vector<std::unique_ptr<Options>> options;
  std::vector<StateList> states;
  for (const auto group : c10::irange(saved_groups.size())) {
    auto& saved = saved_groups[group];
    const size_t param_count = param_groups_[group].params().size();
    TORCH_CHECK_VALUE(saved.params.size() == param_count, "group ", group, " of the archive has ",
                      saved.params.size(), " parameters, but that of the optimizer has ",
                      param_count);
    options.push_back(param_groups_[group].options().clone());
    options.back()->serialize(saved.options);
    own_options(*options.back()).check();
    StateList loaded(param_count);
    for (const auto i : c10::irange(param_count)) {
      InputArchive state_archive;
      if (states_archive.try_read(saved.params[i], state_archive)) {
        loaded[i] = make_empty_state();
        loaded[i]->serialize(state_archive);
      }
    }
    states.push_back(fit_states(group, *options.back(), loaded));
  }

  std::vector<const Options*> all_options;
  for (const auto& entry : options) {
    all_options.push_back(entry.get());
  }
  check_together(all_options);
  const auto replace_more = read_more(archive);

  replace_all(std::move(options), std::move(states));
  if (replace_more) {
    replace_more();
  }
}

void SecondOrderOptimizer::replace_all(std::vector<std::unique_ptr<Options>> options,
                                       std::vector<StateList> states) {
  state_.clear();
  forget_derived();
  for (const auto group : c10::irange(param_groups_.size())) {
    param_groups_[group].set_options(std::move(options[group]));
    for (const auto i : c10::irange(states[group].size())) {
      if (states[group][i] != nullptr) {
        state_[param_groups_[group].params()[i].unsafeGetTensorImpl()] =
            std::move(states[group][i]);
      }
    }
  }
  after_load();
}

}  // namespace torchium::optim
