#include "optim/core/state_memory.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace torchium::optim {
namespace {

struct Kind {
  const char* name;
  int64_t StateMemory::*bytes;
  std::vector<std::string> keys;  // of the state, without the numbers of lists
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all{
      {"statistics",
       &StateMemory::statistics,
       {"statistics", "A", "G", "fisher_blocks", "second_moments"}},
      {"roots",
       &StateMemory::roots,
       {"roots", "A_inverse", "G_inverse", "A_eigenvectors", "G_eigenvectors", "A_eigenvalues",
        "G_eigenvalues", "K", "C"}},
      {"averages", &StateMemory::averages, {"exp_avg", "m_K", "m_C"}},
      {"grafting_second_moments",
       &StateMemory::grafting_second_moments,
       {"grafting_second_moment"}},
      {"momentum_buffers", &StateMemory::momentum_buffers, {"momentum_buffer"}},
      {"diagonals",
       &StateMemory::diagonals,
       {"diagonal", "sum", "hessian_diagonal", "exp_hessian_diag_sq"}},
      {"batches",
       &StateMemory::batches,
       {"inputs", "output_gradients", "uses", "use_eps", "use_ranks", "use_samples"}},
      {"counters",
       &StateMemory::counters,
       {"step", "exp_avg_start", "grafting_second_moment_start", "root_failures", "factor_updates",
        "moment_updates"}},
  };
  return all;
}

}  // namespace

int64_t StateMemory::total() const {
  int64_t bytes = 0;
  for (const Kind& kind : kinds()) {
    bytes += this->*kind.bytes;
  }
  return bytes;
}

StateMemory& StateMemory::operator+=(const StateMemory& other) {
  for (const Kind& kind : kinds()) {
    this->*kind.bytes += other.*kind.bytes;
  }
  return *this;
}

GroupMemory& GroupMemory::operator+=(const GroupMemory& other) {
  elements += other.elements;
  parameters += other.parameters;
  state += other.state;
  workspace += other.workspace;
  graphs += other.graphs;
  return *this;
}

namespace detail {

int64_t TensorBytes::add(const at::Tensor& tensor) {
  const bool has_memory = tensor.defined() && !tensor.is_meta() && tensor.numel() > 0;
  const bool is_new = !has_memory || seen_.insert(tensor.const_data_ptr()).second;
  return tensor.defined() && is_new ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

int64_t TensorBytes::add(at::TensorList tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    bytes += add(tensor);
  }
  return bytes;
}

StateMemory TensorBytes::add(const NamedTensors& state) {
  StateMemory memory;
  for (const auto& [key, tensor] : state) {
    const std::string name = key.substr(0, key.find('.'));  // "roots.0" -> "roots"
    for (const Kind& kind : kinds()) {
      if (std::ranges::find(kind.keys, name) != kind.keys.end()) {
        memory.*kind.bytes += add(tensor);
      }
    }
  }
  return memory;
}

void add_parameter(MemoryReport& report, size_t group, const at::Tensor& param, std::string name,
                   const NamedTensors& state, TensorBytes& bytes) {
  if (state.empty()) {
    return;
  }
  report.parameters.push_back({std::move(name), group, bytes.add(state)});
  GroupMemory& memory = report.groups.at(group);
  memory.state += report.parameters.back().state;
  memory.elements += param.numel();
  memory.parameters += static_cast<int64_t>(param.nbytes());
}

NamedBytes numbers_of(const StateMemory& state) {
  NamedBytes numbers;
  for (const Kind& kind : kinds()) {
    numbers.emplace_back(kind.name, state.*kind.bytes);
  }
  return numbers;
}

NamedBytes numbers_of(const GroupMemory& group) {
  return {{"elements", group.elements},
          {"parameters", group.parameters},
          {"workspace", group.workspace},
          {"graphs", group.graphs}};
}

}  // namespace detail
}  // namespace torchium::optim
