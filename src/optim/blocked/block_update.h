// The update of a block that is a parameter of its own, where ranks share a step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace torchium::optim::detail {

// Elements of a contiguous tensor: rows of neighbours, `stride` elements apart.
struct ElementRows {
  int64_t offset = 0, stride = 0, columns = 0;
};

struct BlockUpdate {
  // Updates of a stage are computed before those of the next, see SharedInputs.
  size_t stage = 0;
  // The parameter that the block is cut from, and its elements there: a step that defers
  // (PlannedStep::defers) updates them. Undefined: it updates the block.
  at::Tensor param = {};
  ElementRows rows = {};
};

}  // namespace torchium::optim::detail
