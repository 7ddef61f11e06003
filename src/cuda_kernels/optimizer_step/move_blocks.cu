#include "cuda_kernels/optimizer_step/move_blocks.h"
#include "cuda_kernels/optimizer_step/parameter_update.cuh"

namespace torchium::cuda_kernels {
namespace {

template <int N, typename Entry, typename Visit>
__device__ void visit_elements(const Entry& block, int begin, int end, const Visit& visit) {
  for (int i = begin + N * static_cast<int>(threadIdx.x); i < end; i += N * kElementThreads) {
    visit(i, i / block.columns * block.row_stride + i % block.columns);
  }
}

// visit.template operator()<N>(block, i, offset): N elements from values[i] and tensor[offset].
template <typename Entry, int bytes, typename Visit>
__device__ void visit_tile(const Table<Entry, bytes>& blocks, const Visit& visit) {
  const int tile = blocks.first_tile + static_cast<int>(blockIdx.x);
  const Entry& block = entry_of_tile(blocks, tile);
  const int begin = (tile - block.first_tile) * kBlockTile;
  const int end = min(block.elements - begin, kBlockTile) + begin;
  if (block.by_fours) {
    visit_elements<4>(block, begin, end, [&](int i, int64_t offset) {
      visit.template operator()<4>(block, i, offset);
    });
  } else {
    visit_elements<1>(block, begin, end, [&](int i, int64_t offset) {
      visit.template operator()<1>(block, i, offset);
    });
  }
}

struct Move {
  UpdateFactors factors;

  template <int N>
  __device__ void operator()(const MovedBlock& block, int i, int64_t offset) const {
    const Lanes<N> d = load_floats<N>(block.values, i);
    move_parameter<N>(factors, block.tensor, block.type, offset, nullptr, offset, d);
  }
};

struct Gather {
  template <int N>
  __device__ void operator()(const GatheredBlock& block, int i, int64_t offset) const {
    store_floats<N>(block.values, i, load_elements<N>(block.tensor, block.type, offset));
  }
};

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    move_kernel(const __grid_constant__ Table<MovedBlock, bytes> blocks, LearningRate lr,
                float decoupled_weight_decay) {
  visit_tile(blocks,
             Move{{static_cast<float>(learning_rate(lr)), decoupled_weight_decay, 0, false}});
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    gather_kernel(const __grid_constant__ Table<GatheredBlock, bytes> blocks) {
  visit_tile(blocks, Gather{});
}

}  // namespace

cudaError_t move_blocks(const Table<MovedBlock>& blocks, const LearningRate& lr,
                        float decoupled_weight_decay, cudaStream_t stream) {
  return launch_shortest(blocks, [&](const auto& table) {
    move_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table, lr, decoupled_weight_decay);
  });
}

cudaError_t gather_blocks(const Table<GatheredBlock>& blocks, cudaStream_t stream) {
  return launch_shortest(blocks, [&](const auto& table) {
    gather_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table);
  });
}

}  // namespace torchium::cuda_kernels
