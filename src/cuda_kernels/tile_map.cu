#include "cuda_kernels/tile_map.h"

#include <cudaTypedefs.h>

namespace torchium::cuda_kernels {

namespace {

// The driver's function, found at run time: the library does not link the driver.
struct Encoder {
  PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  cudaError_t error;

  Encoder() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                             cudaEnableDefault, &found);
    if (error == cudaSuccess && found != cudaDriverEntryPointSuccess) error = cudaErrorNotSupported;
    encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }
};

}  // namespace

cudaError_t make_tile_map(const SplitMatrices& matrices, int64_t count, bool single, TileMap& map) {
  static const Encoder encoder;
  if (encoder.error != cudaSuccess) return encoder.error;

  const auto order = static_cast<cuuint64_t>(matrices.order);
  const cuuint64_t width = single ? order : 2 * order;
  const cuuint64_t sizes[3] = {width, order, static_cast<cuuint64_t>(count)};
  const cuuint64_t strides[2] = {2 * width, 4 * order * order};  // bytes
  const cuuint32_t box[3] = {kBoxHalves, kBoxRows, 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encoder.encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, matrices.data, sizes, strides, box,
                     steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace torchium::cuda_kernels
