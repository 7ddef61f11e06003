// Matrices of all blocks of one shape stand side by side in one buffer, a stack.
//
// The state of a parameter is views of stacks ("slots"), so that it belongs to the parameter while
// the work is batched. A stack is only a memory layout: a step finds neighbouring views by their
// addresses and is right for any layout, so stacks can be rebuilt at any time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::optim::detail {

// Where one slot of one parameter lies: matrices [start, start + count) of stack `stack`.
// A slot is one mode of one block shape of the parameter; `slot` counts them in the order of
// Blocking::shapes, modes innermost.
struct SlotPlacement {
  int64_t param;
  int64_t slot;
  int64_t stack;
  int64_t start;
  int64_t count;
};

// The matrices of a list of parameters. Every vector has one tensor a stack.
struct MatrixStacks {
  std::vector<at::Tensor> statistics;     // [N, n, n], zero
  std::vector<at::Tensor> roots;          // [N, n, n], identity
  std::vector<at::Tensor> root_failures;  // [N] int32, zero
  std::vector<SlotPlacement> layout;      // ordered by (param, slot)
};

}  // namespace torchium::optim::detail
