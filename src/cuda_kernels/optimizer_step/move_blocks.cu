#include "cuda_kernels/optimizer_step/move_blocks.h"
#include "cuda_kernels/optimizer_step/parameter_update.cuh"

namespace torchium::cuda_kernels {
namespace {

template <int N>
__device__ void move_tile(const BlockEntry& block, const UpdateFactors& factors, int begin,
                          int end) {
  for (int i = begin + N * static_cast<int>(threadIdx.x); i < end; i += N * kElementThreads) {
    const Lanes<N> d = load_floats<N>(block.direction, i);
    const int64_t offset = i / block.columns * block.row_stride + i % block.columns;
    move_parameter<N>(factors, block.param, block.type, nullptr, offset, d);
  }
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    move_kernel(const __grid_constant__ Table<BlockEntry, bytes> blocks, LearningRate lr,
                float decoupled_weight_decay) {
  const int tile = blocks.first_tile + static_cast<int>(blockIdx.x);
  const BlockEntry& block = entry_of_tile(blocks, tile);
  const UpdateFactors factors{static_cast<float>(learning_rate(lr)), decoupled_weight_decay, 0,
                              false};
  const int begin = (tile - block.first_tile) * kBlockTile;
  const int end = min(block.elements - begin, kBlockTile) + begin;
  if (block.by_fours) {
    move_tile<4>(block, factors, begin, end);
  } else {
    move_tile<1>(block, factors, begin, end);
  }
}

}  // namespace

cudaError_t move_blocks(const Table<BlockEntry>& blocks, const LearningRate& lr,
                        float decoupled_weight_decay, cudaStream_t stream) {
  return launch_shortest(blocks, [&](const auto& table) {
    move_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table, lr, decoupled_weight_decay);
  });
}

}  // namespace torchium::cuda_kernels
