#include "cuda_kernels/common/hopper.h"
#include "cuda_kernels/common/processor_count.h"
#include "cuda_kernels/common/shared_address.cuh"
#include "cuda_kernels/split_gemm/symmetric_product.h"
#include "cuda_kernels/split_gemm/symmetric_product_consumer.cuh"
#include "cuda_kernels/split_gemm/symmetric_product_movers.cuh"

#include <algorithm>

namespace torchium::cuda_kernels {
namespace {

using namespace symmetric_product_detail;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Pairs of tiles from first_pair on that this block's cluster processes in this launch.
__device__ int tasks_of_cluster(const SymmetricProduct& arguments, int first_pair) {
  const int pairs = TileSchedule(arguments.A.order, arguments.matrices).pairs();
  const int clusters = gridDim.x / kBlocks, cluster = blockIdx.x / kBlocks;
  return max(0, min(kMostTasks, (pairs - first_pair - cluster + clusters - 1) / clusters));
}
#endif

// Compilers for earlier architectures do not support the attribute.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define TORCHIUM_CLUSTER __cluster_dims__(kBlocks, 1, 1)
#else
#define TORCHIUM_CLUSTER
#endif

template <bool single>
__global__ void TORCHIUM_CLUSTER __launch_bounds__(kThreads, 1)
    symmetric_product_kernel(const __grid_constant__ SymmetricProduct arguments,
                             const __grid_constant__ TileMaps maps, int first_pair) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char shared[];
  const uint32_t start = shared_address(shared);
  const uint32_t padding = (1024 - start % 1024) % 1024;
  const Block block{arguments, start + padding,
                    reinterpret_cast<Task*>(shared + padding + kTasksAt),
                    tasks_of_cluster(arguments, first_pair), rank_in_cluster()};
  if (threadIdx.x == 0) block.initialize();
  const int others_matrix = block.place_tile(first_pair);
  wait_for_prerequisites();
  if (arguments.first_start != nullptr && arguments.latest_start < *arguments.first_start) return;
  block.set_state(others_matrix);
  cluster_sync();
  if (threadIdx.x < 128) {
    give_registers<24>();
    if (threadIdx.x == 0) {
      load_operands(block, maps);
      // Not earlier: blocks that wait would keep those of other streams from the multiprocessors.
      launch_dependents();
    }
    if (threadIdx.x == 32) Mover(block, maps, 0).run();
    if (threadIdx.x == 64) Mover(block, maps, 1).run();
  } else {
    take_registers<240>();
    Consumer<single>(block).run();
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive here
#endif
}

cudaError_t make_tile_maps(const SymmetricProduct& arguments, TileMaps& maps) {
  struct Source {
    const SplitMatrices& matrices;
    bool single;
    TileMap& map;
  };
  for (const Source& source :
       {Source{arguments.A, arguments.single, maps.A},
        Source{arguments.B, arguments.single, maps.B},
        Source{arguments.C, arguments.single_C, maps.C},
        Source{arguments.D, arguments.single_D, maps.D}, Source{arguments.E, true, maps.E},
        Source{arguments.first_B, arguments.single, maps.first_B}}) {
    if (source.matrices.data == nullptr) continue;
    const cudaError_t error =
        make_tile_map(source.matrices, arguments.matrices, source.single, source.map);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <bool single>
cudaError_t launch(const SymmetricProduct& arguments, cudaStream_t stream) {
  TileMaps maps{};
  cudaError_t error = make_tile_maps(arguments, maps);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(symmetric_product_kernel<single>,
                               cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  int processors = 0;
  error = count_processors(processors);
  if (error != cudaSuccess) return error;
  const TileSchedule schedule(arguments.A.order, arguments.matrices);
  const int clusters = std::min(processors / kBlocks, schedule.pairs());
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = clusters * kBlocks;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  for (int pair = 0; pair < schedule.pairs(); pair += clusters * kMostTasks) {
    error = cudaLaunchKernelEx(&config, symmetric_product_kernel<single>, arguments, maps, pair);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

int product_sums(int order) { return product_sums_of(order); }

bool has_symmetric_product(int major, int minor, int shared_bytes) {
  return has_hopper_kernel(major, minor, shared_bytes, kSharedBytes);
}

cudaError_t symmetric_product(const SymmetricProduct& arguments, cudaStream_t stream) {
  if (arguments.matrices == 0) return cudaSuccess;
  return arguments.single ? launch<true>(arguments, stream) : launch<false>(arguments, stream);
}

}  // namespace torchium::cuda_kernels
