// Blocks of tensors: gathered in memory of their own, and moved along directions that are known.
#pragma once

#include "cuda_kernels/optimizer_step/step_control.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// A block of `elements` = rows times `columns`, whose rows lie `row_stride` elements apart in the
// tensor and side by side in `values`.
template <typename Memory, typename Values>
struct BlockEntry {
  Memory* tensor;  // its first element there
  Values* values;
  int64_t row_stride;
  int elements, columns;
  int first_tile;
  ElementType type;  // of the tensor
  bool by_fours;     // four neighbours may be read at once
};
using MovedBlock = BlockEntry<void, const float>;
using GatheredBlock = BlockEntry<const void, float>;
constexpr int kBlockTile = 1 << 13;  // elements

// p <- (1 - lr wd) p - lr d for the elements p of the tensor and d of the values, with the
// roundings of every other step (parameter_update.cuh).
cudaError_t move_blocks(const Table<MovedBlock>& blocks, const LearningRate& lr,
                        float decoupled_weight_decay, cudaStream_t stream);

// Copies the elements of the tensor to the values.
cudaError_t gather_blocks(const Table<GatheredBlock>& blocks, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
