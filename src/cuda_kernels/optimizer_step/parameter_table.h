// The parameters of a step as a table in the arguments of a kernel, so that one launch processes
// hundreds of them and nothing is copied to the device beforehand.
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef __CUDACC__
#define TORCHIUM_HOST_DEVICE __host__ __device__
#else
#define TORCHIUM_HOST_DEVICE
#endif

namespace torchium::cuda_kernels {

enum class ElementType : uint8_t { kFloat, kBFloat16, kHalf, kDouble };

// Arguments of a kernel may take 32,764 bytes. They are copied several times, which takes as long
// as the rest of a launch.
constexpr int kTableBytes = 32 * 1024 - 256;
constexpr int kShortTableBytes = 6 * 1024;

// A list of entries. Each has consecutive tiles; a tile is the work of one thread block.
template <typename Entry, int bytes = kTableBytes>
struct Table {
  static constexpr int kCapacity = (bytes - 16) / sizeof(Entry);

  Table() {}  // leaves the entries as they are
  int tiles() const { return end_tile - first_tile; }

  int count = 0;
  int first_tile = 0;  // of the first entry
  int end_tile = 0;
  Entry entries[kCapacity];
};

template <typename Entry>
using ShortTable = Table<Entry, kShortTableBytes>;

// launch(table), or if they fit in there with a short one that has the same entries.
template <typename Entry, typename Launch>
void launch_shortest(const Table<Entry>& table, const Launch& launch) {
  if (table.count > ShortTable<Entry>::kCapacity) {
    launch(table);
    return;
  }
  ShortTable<Entry> fitting;
  fitting.count = table.count;
  fitting.first_tile = table.first_tile;
  fitting.end_tile = table.end_tile;
  std::copy_n(table.entries, table.count, fitting.entries);
  launch(fitting);
}

// The tensors that are scanned before a step.
enum class ScanKind : uint8_t { kGradient, kAverage, kParameter };

// A gradient, its average, or a parameter, of any shape.
struct ScanEntry {
  const void* data;
  int64_t elements;
  int first_tile;
  int index;  // of the parameter in the step
  ElementType type;
  ScanKind kind;
  // The step can work with magnitudes up to largest / sqrt(*step + 1) in gradients and parameters;
  // null: up to `largest`.
  const double* step;
  double largest;
};
constexpr int64_t kScanTile = 1 << 14;  // elements

// The step count of a parameter, and its value when an average began; null: 0.
struct StepEntry {
  double* step;
  const double* exp_avg_start;
  const double* second_moment_start;
};

// How the direction of a parameter is computed.
enum class Direction : uint8_t {
  kMatrices,  // products with its blocks
  kDiagonal,
  kGrafted,  // the grafted method's own direction
};

// A parameter of order one or two after merging, seen as a matrix that is cut into blocks. All its
// tensors have one memory layout; state is float32 and null where it is not used.
struct ParameterEntry {
  void* param;
  const void* grad;
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
    block_columns = (columns + block_size - 1) / block_size;
    const int rest = rows % block_size;
    tiles = block_columns * (rows / block_size * strips + (rest + strip_rows - 1) / strip_rows);
  }
};

}  // namespace torchium::cuda_kernels
