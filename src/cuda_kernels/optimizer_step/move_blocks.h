// Moves blocks of parameters along directions that are known, all of a group in few launches.
#pragma once

#include "cuda_kernels/optimizer_step/step_control.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// A block of `elements` = rows times `columns`, whose rows lie `row_stride` elements apart in the
// parameter and side by side in the direction.
struct BlockEntry {
  void* param;  // its first element there
  const float* direction;
  int64_t row_stride;
  int elements, columns;
  int first_tile;
  ElementType type;
  bool by_fours;  // four neighbours may be read at once
};
constexpr int kBlockTile = 1 << 13;  // elements

// p <- (1 - lr wd) p - lr d, with the roundings of every other step (parameter_update.cuh).
cudaError_t move_blocks(const Table<BlockEntry>& blocks, const LearningRate& lr,
                        float decoupled_weight_decay, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
