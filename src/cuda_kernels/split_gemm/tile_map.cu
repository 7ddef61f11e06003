#include "cuda_kernels/split_gemm/tile_map.h"

#include <cudaTypedefs.h>

namespace torchium::cuda_kernels {

namespace {

// The driver's function, loaded at run time: the library does not link the driver.
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

// It matters only for elements outside, which are zero.
constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

// Boxes of 16-bit numbers in `rank` dimensions.
cudaError_t encode(const void* data, int rank, const cuuint64_t* sizes, const cuuint64_t* strides,
                   const cuuint32_t* box, const cuuint32_t* steps, TileMap& map) {
  static const Encoder encoder;
  if (encoder.error != cudaSuccess) return encoder.error;
  const CUresult result =
      encoder.encode(&map, kType, rank, const_cast<void*>(data), sizes, strides, box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Boxes in matrices, whose first two dimensions are columns and rows.
constexpr cuuint32_t kMatrixBox[4] = {kBoxElements, kBoxRows, 1, 1};
constexpr cuuint32_t kOneByOne[4] = {1, 1, 1, 1};

}  // namespace

cudaError_t make_tile_map(const SplitMatrices& matrices, int64_t count, bool single, TileMap& map) {
  const auto order = static_cast<cuuint64_t>(matrices.order);
  const cuuint64_t width = single ? order : 2 * order;
  const cuuint64_t sizes[] = {width, order, static_cast<cuuint64_t>(count)};
  const cuuint64_t strides[] = {2 * width, 4 * order * order};  // bytes
  return encode(matrices.data, 3, sizes, strides, kMatrixBox, kOneByOne, map);
}

cudaError_t make_tile_map(const SplitFp16& batch, int64_t matrices, TileMap& map, int64_t between) {
  const auto columns = static_cast<cuuint64_t>(batch.columns);
  const auto rows = static_cast<cuuint64_t>(batch.rows);
  const auto count = static_cast<cuuint64_t>(matrices);
  const cuuint64_t parts = batch.lo == nullptr ? 1 : 2;
  const cuuint64_t sizes[] = {columns, rows, count, parts};
  const cuuint64_t of_matrix = between > 0 ? 2 * between : 2 * columns * rows;
  // Parts are any multiple of 16 bytes apart.
  const cuuint64_t strides[] = {2 * columns, of_matrix,
                                parts == 1 ? of_matrix : 2 * (batch.lo - batch.hi)};
  return encode(batch.hi, 4, sizes, strides, kMatrixBox, kOneByOne, map);
}

cudaError_t make_tile_map(const TiledImages& images, const BoxOfPixels& box, TileMap& map) {
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const cuuint64_t sizes[] = {size(images.channels), size(images.width), size(images.height),
                              size(images.samples)};
  const cuuint64_t strides[] = {2 * size(images.pixel_pitch), 2 * size(images.row_pitch),
                                2 * size(images.sample_pitch)};  // bytes
  const auto extent = [](int value) { return static_cast<cuuint32_t>(value); };
  const cuuint32_t range[] = {kBoxElements, extent(box.width * box.stride_x),
                              extent(box.height * box.stride_y), extent(box.samples)};
  const cuuint32_t steps[] = {1, extent(box.stride_x), extent(box.stride_y), 1};
  return encode(images.data, 4, sizes, strides, range, steps, map);
}

cudaError_t make_tile_map(const float* matrix, int64_t rows, int64_t columns, int box_rows,
                          TileMap& map) {
  const auto height = static_cast<cuuint64_t>(rows), width = 2 * static_cast<cuuint64_t>(columns);
  const cuuint64_t sizes[] = {width, height, 1};
  const cuuint64_t strides[] = {2 * width, 2 * width * height};  // bytes
  const cuuint32_t box[] = {kBoxElements, static_cast<cuuint32_t>(box_rows), 1};
  return encode(matrix, 3, sizes, strides, box, kOneByOne, map);
}

}  // namespace torchium::cuda_kernels
