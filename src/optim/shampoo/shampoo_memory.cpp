#include "optim/shampoo/shampoo_memory.h"

#include "optim/blocked/preconditioner.h"
#include "optim/shampoo/shampoo_rules.h"

#include <ATen/ATen.h>

#include <vector>

namespace torchium::optim::detail {
namespace {

// Stacks without memory, whose sizes and dtypes are those that init_state would make.
BlockStorage planned_storage(const ShampooHyperparameters& h, at::TensorList params) {
  std::vector<at::Tensor> shapes;
  for (const auto& param : params) {
    shapes.push_back(at::empty(param.sizes(), param.options().device(at::kMeta)));
  }
  return shampoo_init_state(h, shapes);
}

int64_t total_bytes(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

int64_t state_bytes(const at::Tensor& param) {  // of one tensor of the parameter's shape
  return param.numel() * static_cast<int64_t>(c10::elementSize(state_dtype(param)));
}

}  // namespace

StateMemory shampoo_state_memory(const ShampooHyperparameters& h, at::TensorList params) {
  const BlockStorage storage = planned_storage(h, params);
  StateMemory memory;
  memory.statistics = total_bytes(storage.statistics);
  memory.roots = total_bytes(storage.roots);
  memory.counters = total_bytes(storage.root_failures);
  for (const auto& param : params) {
    const int64_t bytes = state_bytes(param);
    memory.counters += static_cast<int64_t>(c10::elementSize(at::kDouble));
    memory.diagonals += rule_of_shape(h, param.sizes()) == ParameterRule::kDiagonal ? bytes : 0;
    memory.averages += h.beta1 > 0.0 ? bytes : 0;
    memory.grafting_second_moments += uses_second_moment(h) ? bytes : 0;
    memory.momentum_buffers += h.momentum > 0.0 ? bytes : 0;
  }
  return memory;
}

}  // namespace torchium::optim::detail
