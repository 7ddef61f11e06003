// Block storage: the matrices of all blocks of one shape lie side by side in one buffer.
//
// The state of a parameter is views ("slots") of these buffers: it belongs to the parameter, yet
// work is batched. A buffer is only a memory layout. A step finds neighbouring views by their
// addresses and is correct for any layout, so storage can be rebuilt at any time.
#pragma once

#include "optim/blocked/blocking.h"
#include "optim/core/parameter_state.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// Where one slot of one parameter lies: matrices [start, start + count) of a buffer. A slot is one
// mode of one block shape of the parameter; slots are numbered in the order of Blocking::shapes,
// modes innermost.
struct SlotPlacement {
  int64_t param;
  int64_t slot;
  int64_t buffer;
  int64_t start;
  int64_t count;
};

// The matrices of a list of parameters. Every vector has one tensor per buffer.
struct BlockStorage {
  std::vector<at::Tensor> statistics;     // [N, n, n], zero
  std::vector<at::Tensor> roots;          // [N, n, n], identity, in the state dtype or bfloat16
  std::vector<at::Tensor> root_failures;  // [N] int32, zero
  std::vector<SlotPlacement> layout;      // ordered by (param, slot)
};

// Storage for `params`, cut into blocks by `blockings`; a Blocking without shapes has no matrices.
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
  int64_t count = 0;                      // matrices per mode
  std::vector<at::Tensor> statistics;     // one per mode: [count, n, n]
  std::vector<at::Tensor> roots;          // one per mode: [count, n, n]
  std::vector<at::Tensor> root_failures;  // one per mode: [count]
};

// Elements that the products for the direction of one block read: the block and its roots.
int64_t operand_elements(const std::vector<int64_t>& sizes);
// On a GPU, directions are computed with this many operand elements at a time. This bounds the
// memory for operands and keeps intermediate results in the L2 cache. Fewer than eight matrices of
// order 1024 leave a GPU half idle.
constexpr int64_t kOperandsInFlight = 3 * (int64_t{1} << 23);

// Groups the slots of some parameters, by their positions in the lists, into the largest batches
// that need no copy. The batches refer to `blockings`.
std::vector<MatrixBatch> find_batches(const std::vector<Blocking>& blockings,
                                      const StateList& states, const std::vector<size_t>& members);

// Allocates memory for the blocks of one tensor per parameter, [count, sizes...]. The entries of
// `tensors` of parameters that are one block become views of it, so results written there need no
// packing. Undefined if the whole batch is one such parameter.
at::Tensor set_aside_blocks(const MatrixBatch& batch, const std::vector<Blocking>& blockings,
                            at::TensorList params, std::vector<at::Tensor>& tensors);

// The blocks of one tensor per parameter, [count, sizes...]. Copied to `blocks` if that is defined,
// except for tensors that are already views of it; else a view where possible.
at::Tensor pack(const MatrixBatch& batch, const std::vector<Blocking>& blockings,
                const std::vector<at::Tensor>& tensors, at::Tensor blocks);

// The inverse of pack(): writes the blocks of each entry to `tensors[entry.param]`, which becomes a
// view if the parameter is one block and is allocated by the first batch of the parameter
// otherwise.
void unpack(const MatrixBatch& batch, const std::vector<Blocking>& blockings,
            const at::Tensor& blocks, at::TensorList params, std::vector<at::Tensor>& tensors);

}  // namespace torchium::optim::detail
