// The elementwise work of a Shampoo step on a GPU, for all parameters of a group at once: on the
// gradients before the matrix products, and on the directions after them. Symbols as in
// optim/shampoo/shampoo_step.cpp.
#pragma once

#include "cuda_kernels/optimizer_step/step_control.h"

#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// How the direction of a parameter is computed.
enum class Direction : uint8_t {
  kMatrices,  // products with its blocks
  kDiagonal,
  kGrafted,  // the grafted method's own direction
};

// A parameter of order one or two after merging, seen as a matrix that is cut into blocks. All its
// tensors have one memory layout, the gradient (in StepNumbers) too, but for the strides of these
// two; state is float32 and null where it is not used.
struct ParameterEntry {
  void* param;
  float* exp_avg;
  float* second_moment;  // of the grafted method
  float* momentum_buffer;
  float* diagonal;  // of Direction::kDiagonal
  // Where its blocks begin in the block workspace, in elements: whole ones, those cut short in
  // columns, in rows, in both.
  int64_t blocks[4];
  int matrices[4];  // the same, counted in blocks of the fp16 workspace
  uint8_t in_fp16;  // bit i: blocks of blocks[i] are stored in fp16
  int rows, columns;
  int64_t param_stride;  // between rows of the parameter alone; columns where it has that layout
  // Column c lies at (c % inner) (columns / inner) + c / inner of its row: 1, or the kernel
  // positions of a convolution in channels-last layout.
  int inner;
  int first_tile;
  int index;  // of the parameter in the step
  ElementType param_type, grad_type;
  Direction direction;
  bool by_fours;  // rows of blocks may be read four elements at a time
};

// How a parameter is cut into tiles: rows of blocks into strips of equal height.
struct TileGrid {
  static constexpr int kTileElements = 1 << 13;
  static constexpr int kMaxStrips = 256;

  int block_columns;  // blocks side by side
  int strip_rows;
  int strips;  // of a whole block
  int tiles;

  TORCHIUM_HOST_DEVICE TileGrid(int rows, int columns, int block_size) {
    const int height = rows < block_size ? rows : block_size;
    const int width = columns < block_size ? columns : block_size;
    const int fitting = kTileElements / width, least = (height + kMaxStrips - 1) / kMaxStrips;
    strip_rows = fitting > least ? fitting : least;
    strip_rows = strip_rows < height ? strip_rows : height;
    strips = (block_size + strip_rows - 1) / strip_rows;
    block_columns = (columns - 1) / block_size + 1;
    const int rest = rows % block_size;
    tiles = block_columns * (rows / block_size * strips + (rest + strip_rows - 1) / strip_rows);
  }
};

// The rule of Direction::kGrafted has no blocks: its parameters are one row, cut into whole tiles.
TORCHIUM_HOST_DEVICE inline int block_size_of(const ParameterEntry& entry, int block_size) {
  return entry.direction == Direction::kGrafted ? TileGrid::kTileElements : block_size;
}

struct ElementRule {
  int block_size;
  bool maximize;
  float weight_decay;  // L2, added to the gradient
  float decoupled_weight_decay;
  float beta1, moment_beta, diagonal_beta;
  float grafting_eps, diagonal_eps;
  float momentum;
  bool nesterov;
  bool grafting;   // otherwise a direction keeps its norm
  bool from_zero;  // p counts as zero before the step
};

// Buffers of one step. Partial sums of squares: one per tile.
struct StepBuffers {
  const StepControl* control;
  const StepNumbers* numbers;
  // Batches of the blocks of g, and of m unless that is g; as floats or fp16 parts.
  float *gradients, *averages;
  __half *gradients_hi, *gradients_lo;  // lo null: not asked for
  __half *averages_hi, *averages_lo;
  float *gradient_scales, *average_scales;  // [blocks of fp16 parts]
  const float* directions;                  // what the products made of m
  float* grafted_squares;
  float* direction_squares;
};

// Updates the averages and writes g and m to their blocks; zeros where the step is skipped. Sums
// the squares of f, and of d by the diagonal rule; none of those with Direction::kGrafted.
cudaError_t gather_gradients(const ElementRule& rule, const Table<ParameterEntry>& parameters,
                             const StepBuffers& buffers, cudaStream_t stream);

// Sums the squares of the directions of parameters with matrices. For grafting alone.
cudaError_t sum_directions(const ElementRule& rule, const Table<ParameterEntry>& parameters,
                           const StepBuffers& buffers, cudaStream_t stream);

// Grafting, weight decay, momentum and p <- p - lr d.
cudaError_t update_parameters(const ElementRule& rule, const Table<ParameterEntry>& parameters,
                              const StepBuffers& buffers, const LearningRate& lr,
                              cudaStream_t stream);

}  // namespace torchium::cuda_kernels
