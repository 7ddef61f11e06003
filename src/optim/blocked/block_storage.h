// Matrices of all blocks of one shape stand side by side in one buffer, a buffer.
//
// The state of a parameter is views of storage ("slots"), so that it belongs to the parameter while
// the work is batched. A buffer is only a memory layout: a step finds neighbouring views by their
// addresses and is right for any layout, so storage can be rebuilt at any time.
#pragma once

#include "optim/blocked/blocking.h"
#include "optim/core/parameter_state.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// Where one slot of one parameter lies: matrices [start, start + count) of buffer `buffer`.
// A slot is one mode of one block shape of the parameter; `slot` counts them in the order of
// Blocking::shapes, modes innermost.
struct SlotPlacement {
  int64_t param;
  int64_t slot;
  int64_t buffer;
  int64_t start;
  int64_t count;
};

// The matrices of a list of parameters. Every vector has one tensor a buffer.
struct BlockStorage {
  std::vector<at::Tensor> statistics;     // [N, n, n], zero
  std::vector<at::Tensor> roots;          // [N, n, n], identity, in the state dtype or bfloat16
  std::vector<at::Tensor> root_failures;  // [N] int32, zero
  std::vector<SlotPlacement> layout;      // ordered by (param, slot)
};

// Stacks for `params` cut as `blockings` say; an empty Blocking (no shapes) has no matrices.
// root_dtype: "bfloat16", or none for the state dtype.
BlockStorage make_block_storage(at::TensorList params, const std::vector<Blocking>& blockings,
                                const std::optional<std::string>& root_dtype = std::nullopt);

// Matrices of one block shape that are adjacent in memory, of one or more parameters.
struct MatrixBatch {
  struct Entry {
    int64_t param;
    const BlockShape* shape;
    int64_t start;  // index of its first matrix in the batch
  };
  std::vector<int64_t> sizes;             // of a block
  std::vector<Entry> entries;             // in the order of the parameters
  int64_t count = 0;                      // matrices a mode
  std::vector<at::Tensor> statistics;     // one a mode: [count, n, n]
  std::vector<at::Tensor> roots;          // one a mode: [count, n, n]
  std::vector<at::Tensor> root_failures;  // one a mode: [count]
};

// What the products for the direction of one block read: it and its roots, in elements.
int64_t operand_elements(const std::vector<int64_t>& sizes);
// On a GPU directions are computed with so many at a time, which bounds the memory for operands and
// keeps what lies between two products in the L2 cache. Fewer than eight matrices of order 1024
// leave a GPU half idle.
constexpr int64_t kOperandsInFlight = 3 * (int64_t{1} << 23);

// Groups the slots of some parameters, by their positions in the lists, into the largest batches
// that need no copy. Checks number and shape of the slots. The batches refer to `blockings`.
std::vector<MatrixBatch> find_batches(const std::vector<Blocking>& blockings,
                                      const StateList& states, const std::vector<size_t>& members);

// Memory for the blocks of one tensor a parameter, [count, sizes...]; points `tensors` of
// parameters that are one block at their place in it, so that what is written there need not be
// packed. Undefined where the whole batch is one such parameter.
at::Tensor set_aside_blocks(const MatrixBatch& batch, const std::vector<Blocking>& blockings,
                            at::TensorList params, std::vector<at::Tensor>& tensors);

// The blocks of one tensor a parameter, [count, sizes...]: in `blocks` if defined, where what is in
// place already is not moved; else a view where possible.
at::Tensor pack(const MatrixBatch& batch, const std::vector<Blocking>& blockings,
                const std::vector<at::Tensor>& tensors, at::Tensor blocks);

// The inverse: writes the blocks of each entry to `tensors[entry.param]`, which becomes a view
// where nothing must move (and is allocated by the first batch of its parameter otherwise).
void unpack(const MatrixBatch& batch, const std::vector<Blocking>& blockings,
            const at::Tensor& blocks, at::TensorList params, std::vector<at::Tensor>& tensors);

}  // namespace torchium::optim::detail
