// How reports of memory are put together.
#pragma once

#include "optim/core/parameter_state.h"
#include "torchium/export.h"
#include "torchium/optim/memory_report.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// Counts bytes of tensors, those at one address once: some are shared by parameters.
class TensorBytes {
 public:
  int64_t add(const at::Tensor& tensor);
  int64_t add(at::TensorList tensors);
  // State of one parameter. Only tensors under keys of the optimizers count.
  StateMemory add(const NamedTensors& state);

 private:
  std::unordered_set<const void*> seen_;
};

// Adds a parameter of a group of the report and its state; an empty one does not count.
void add_parameter(MemoryReport& report, size_t group, const at::Tensor& param, std::string name,
                   const NamedTensors& state, TensorBytes& bytes);

// The fields by name: those of the group without its state, and those of a state.
using NamedBytes = std::vector<std::pair<std::string, int64_t>>;
TORCHIUM_API NamedBytes numbers_of(const GroupMemory& group);
TORCHIUM_API NamedBytes numbers_of(const StateMemory& state);

}  // namespace torchium::optim::detail
