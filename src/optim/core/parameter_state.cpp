#include "optim/core/parameter_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <string_view>
#include <system_error>

namespace torchium::optim::detail {
namespace {

constexpr std::pair<std::string_view, at::Tensor ParameterState::*> kTensors[] = {
    {"step", &ParameterState::step},
    {"diagonal", &ParameterState::diagonal},
    {"exp_avg", &ParameterState::exp_avg},
    {"grafting_second_moment", &ParameterState::grafting_second_moment},
    {"momentum_buffer", &ParameterState::momentum_buffer},
    {"exp_avg_start", &ParameterState::exp_avg_start},
    {"grafting_second_moment_start", &ParameterState::grafting_second_moment_start},
    {"sum", &ParameterState::sum},
    {"hessian_diagonal", &ParameterState::hessian_diagonal},
    {"exp_hessian_diag_sq", &ParameterState::exp_hessian_diag_sq}};

constexpr std::pair<std::string_view, std::vector<at::Tensor> ParameterState::*> kSlots[] = {
    {"statistics", &ParameterState::statistics},
    {"roots", &ParameterState::roots},
    {"root_failures", &ParameterState::root_failures}};

constexpr size_t kMaxListSize = 1 << 20;

}  // namespace

at::ScalarType state_dtype(const at::Tensor& param) {
  return param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

const at::Tensor* find_tensor(const NamedTensors& tensors, const std::string& key) {
  const auto found = std::find_if(tensors.begin(), tensors.end(),
                                  [&](const auto& entry) { return entry.first == key; });
  return found == tensors.end() ? nullptr : &found->second;
}

std::optional<size_t> index_in_list(std::string_view key, std::string_view list) {
  if (!key.starts_with(list) || key.substr(list.size(), 1) != ".") {
    return std::nullopt;
  }
  size_t index = 0;
  const char* end = key.data() + key.size();
  const auto [rest, error] = std::from_chars(key.data() + list.size() + 1, end, index);
  const bool is_index = error == std::errc() && rest == end && index < kMaxListSize;
  return is_index ? std::optional(index) : std::nullopt;
}

ParameterState::ParameterState(const NamedTensors& tensors) {
  for (const auto& [key, tensor] : tensors) {
    for (const auto& [name, member] : kTensors) {
      if (key == name) {
        this->*member = tensor;
      }
    }
    for (const auto& [name, member] : kSlots) {
      if (const auto slot = index_in_list(key, name)) {
        auto& slots = this->*member;
        slots.resize(std::max(slots.size(), *slot + 1));
        slots[*slot] = tensor;
      }
    }
  }
}

NamedTensors ParameterState::named() const {
  NamedTensors tensors;
  const auto add = [&](std::string key, const at::Tensor& tensor) {
    if (tensor.defined()) {
      tensors.emplace_back(std::move(key), tensor);
    }
  };
  for (const auto& [key, member] : kTensors) {
    add(std::string(key), this->*member);
  }
  for (const auto& [name, member] : kSlots) {
    for (size_t slot = 0; slot < (this->*member).size(); ++slot) {
      add(std::string(name) + "." + std::to_string(slot), (this->*member)[slot]);
    }
  }
  return tensors;
}

bool ParameterState::is_same(const ParameterState& other) const {
  const NamedTensors ours = named(), theirs = other.named();
  return std::equal(ours.begin(), ours.end(), theirs.begin(), theirs.end(),
                    [](const auto& a, const auto& b) {
                      return a.first == b.first && a.second.is_same(b.second);
                    });
}

at::Tensor parameter_shaped_zeros(const at::Tensor& param) {
  const auto options = param.options().dtype(state_dtype(param)).requires_grad(false);
  return param.is_meta() ? at::empty(param.sizes(), options) : at::zeros_like(param, options);
}

at::Tensor identities(int64_t count, int64_t n, const at::TensorOptions& options) {
  return options.device().is_meta() ? at::empty({count, n, n}, options)
                                    : at::eye(n, options).expand({count, n, n}).contiguous();
}

std::vector<at::Tensor> list_of(const StateList& states, at::Tensor ParameterState::*member) {
  std::vector<at::Tensor> list;
  list.reserve(states.size());
  for (const ParameterState& state : states) {
    list.push_back(state.*member);
  }
  return list;
}

}  // namespace torchium::optim::detail
