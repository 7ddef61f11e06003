#include "cuda_kernels/common/hopper.h"
#include "cuda_kernels/common/pipeline.cuh"
#include "cuda_kernels/common/processor_count.h"
#include "cuda_kernels/common/shared_address.cuh"
#include "cuda_kernels/common/triangle.cuh"
#include "cuda_kernels/krylov/symmetric_block_product.h"
#include "cuda_kernels/split_gemm/tile_map.h"

namespace torchium::cuda_kernels {
namespace {

constexpr int kVectors = 8;
constexpr int kTile = 128;  // rows and columns
constexpr int kBoxColumns = kBoxElements / 2;
constexpr int kBoxes = kTile / kBoxColumns;
constexpr int kSquare = 2 * kTile;         // rows and columns of the four tiles of a unit of work
constexpr int kPart = kSquare * kVectors;  // numbers of a partial result, [kSquare, kVectors]
constexpr int kStages = 3;
constexpr int kOfRows = kTile / 32;      // warps that multiply 32 rows of a tile each
constexpr int kComputing = 2 * kOfRows;  // the others multiply its columns
constexpr int kThreads = 32 * (kComputing + 1);
constexpr int kQuadruples = 32;  // of numbers, per block of add_parts_kernel
constexpr int kGroups = 8;       // of its threads, which share the terms of a sum

// Rows of 128 bytes in boxes, as tile_map.h has them: 16 bytes of a row are at the place that is
// the exclusive or of their number and the row's.
struct Stage {
  float A[kBoxes][kTile][kBoxColumns];
  float of_columns[kBoxes][kVectors][kBoxColumns];  // X at the columns of the tile
  float of_rows[kBoxes][kVectors][kBoxColumns];
};
struct Shared {
  Stage stages[kStages];
  uint64_t full[kStages], empty[kStages];
};
constexpr int kSharedBytes = sizeof(Shared) + 1024;  // to align it

// The squares on and below the diagonal in thread blocks of equal numbers, row by row. What a
// thread block adds up over a row of squares goes to part `block + row`, a number that no other sum
// has.
struct Work {
  int64_t squares;
  int blocks;

  __host__ __device__ int64_t first_of(int block) const { return block * squares / blocks; }
  __device__ int block_of(int64_t square) const {
    return static_cast<int>(((square + 1) * blocks - 1) / squares);
  }
};

// The vector that column i of a product stands for: the three bits of i in reverse order, with
// which no two lanes read the same bank at a time.
__host__ __device__ constexpr int vector_of(int i) { return i % 2 * 4 + i / 2 % 2 * 2 + i / 4; }

int square_rows_of(int64_t n) { return static_cast<int>((n + kSquare - 1) / kSquare); }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// x = high + low but for its last two bits, both in TF32.
template <int N>
struct Split {
  uint32_t high[N], low[N];

  __device__ explicit Split(const float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      high[i] = __float_as_uint(x[i]) & 0xffffe000u;
      low[i] = __float_as_uint(x[i] - __uint_as_float(high[i]));
    }
  }
};

// c += a b for a [16, 8], b [8, 8], in TF32. Lane 4 g + t has of a the elements (g, t), (g + 8, t),
// (g, t + 4), (g + 8, t + 4), of b (t, g), (t + 4, g), of c (g, 2 t), (g, 2 t + 1), (g + 8, 2 t),
// (g + 8, 2 t + 1).
__device__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A sum of products [16, 8] [8, 8]. Tensor cores cut off what a sum cannot hold: only a few large
// products are summed there, the others in float32.
class Sum {
 public:
  __device__ void add(const float (&a)[4], const Split<2>& b) {
    const Split<4> split(a);
    multiply_add(few_, split.high, b.high);
    multiply_add(left_low_, split.low, b.high);
    multiply_add(right_low_, split.high, b.low);
  }
  __device__ void round() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      high_[i] += few_[i];
      few_[i] = 0;
    }
  }
  // To the rows `upper` and `lower` of a part, for which lane / 4 and lane / 4 + 8 stand.
  __device__ void store(float* part, int upper, int lower, int t) const {
    const auto value = [&](int i) { return high_[i] + (left_low_[i] + right_low_[i]); };
    *reinterpret_cast<float2*>(part + upper * kVectors + 2 * t) = {value(0), value(1)};
    *reinterpret_cast<float2*>(part + lower * kVectors + 2 * t) = {value(2), value(3)};
  }

 private:
  float high_[4] = {}, few_[4] = {}, left_low_[4] = {}, right_low_[4] = {};
};

// The tiles of a thread block, in the order in which its warps use the stages.
class Ring {
 public:
  __device__ explicit Ring(Shared& shared) : shared_(shared) {}

  __device__ const Stage& next() const {
    wait_for(shared_address(&shared_.full[position_.slot()]), position_.parity());
    return shared_.stages[position_.slot()];
  }
  __device__ void release(int lane) {
    __syncwarp();
    if (lane == 0) arrive(shared_address(&shared_.empty[position_.slot()]));
    position_.advance();
  }
  // By one thread. row, column: of the tile, in tiles.
  __device__ void load(const TileMap& A, const TileMap& X, int row, int column) {
    const uint32_t full = shared_address(&shared_.full[position_.slot()]);
    Stage& stage = shared_.stages[position_.slot()];
    wait_for(shared_address(&shared_.empty[position_.slot()]), position_.parity() ^ 1);
    arrive_and_expect(full, sizeof(Stage));
    for (int b = 0; b < kBoxes; ++b) {
      const int c = 2 * (column * kTile + b * kBoxColumns), r = 2 * (row * kTile + b * kBoxColumns);
      copy_box(shared_address(stage.A[b]), A, c, row * kTile, 0, full);
      copy_box(shared_address(stage.of_columns[b]), X, c, 0, 0, full);
      copy_box(shared_address(stage.of_rows[b]), X, r, 0, 0, full);
    }
    position_.advance();
  }
  __device__ void initialize() {
    for (int i = 0; i < kStages; ++i) {
      initialize_barrier(shared_address(&shared_.full[i]), 1);
      initialize_barrier(shared_address(&shared_.empty[i]), kComputing);
    }
    publish_barriers();
  }

 private:
  Shared& shared_;
  Position<kStages> position_;
};

// f(c, r) for the tiles of a square: column c and row r of it. Of one on the diagonal the tile
// above is left out.
template <typename F>
__device__ void for_each_tile(const TriangleTile& square, const F& f) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (square.row > square.column || r >= c) f(c, r);
    }
  }
}

// Lane 4 g + t.
struct Lane {
  int index, g, t;
  int vector;  // vector_of(g)
  __device__ explicit Lane(int index)
      : index(index), g(index / 4), t(index % 4), vector(vector_of(g)) {}
};

template <typename T>
__device__ T load_as(const float* address) {
  return *reinterpret_cast<const T*>(address);
}

// Adds the product of 32 rows of the tile, from `first` on, with X at its columns. vector_of(g)
// stands for row g of a product, and columns are taken in the order in which a lane reads them.
__device__ void multiply_rows(Sum (&sums)[2], const Stage& stage, int first, const Lane& lane) {
#pragma unroll 2
  for (int i = 0; i < kTile / 16; ++i) {
    const int box = i / 2, place = 4 * ((4 * (i % 2) + lane.t) ^ lane.vector);
    const auto x = load_as<float4>(stage.of_columns[box][lane.vector] + place);
    const Split<2> b({x.x, x.y}), next_b({x.z, x.w});
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const auto* rows = stage.A[box] + first + 16 * m + lane.vector;
      const auto upper = load_as<float4>(rows[0] + place), lower = load_as<float4>(rows[8] + place);
      sums[m].add({upper.x, lower.x, upper.y, lower.y}, b);
      sums[m].add({upper.z, lower.z, upper.w, lower.w}, next_b);
      if (i % 2 == 1) sums[m].round();
    }
  }
}

// Adds the product of the columns of a box, transposed, with X at the rows of the tile. The columns
// 4 g and 4 g + 1 stand for rows g and g + 8 of the first product, the next two for those of the
// second.
__device__ void multiply_columns(Sum (&sums)[2], const Stage& stage, int box, const Lane& lane) {
  const int row = 2 * lane.t;
  const int place = 4 * (lane.g ^ row), next_place = 4 * (lane.g ^ (row + 1));
#pragma unroll 4
  for (int i = 0; i < kTile / 8; ++i) {
    const auto* rows = stage.A[box] + 8 * i + row;
    const auto u = load_as<float4>(rows[0] + place), v = load_as<float4>(rows[1] + next_place);
    const int chunk = (2 * (i % 4) + lane.t / 2) ^ lane.vector;
    const auto x = load_as<float2>(stage.of_rows[i / 4][lane.vector] + 4 * chunk + row % 4);
    const Split<2> b({x.x, x.y});
    sums[0].add({u.x, u.y, v.x, v.y}, b);
    sums[1].add({u.z, u.w, v.z, v.w}, b);
    if (i % 4 == 3) {
      sums[0].round();
      sums[1].round();
    }
  }
}

// row_parts[block + row]: sums over squares of a row; column_parts[square]: the product of the
// transposed square without its diagonal tiles.
__device__ void multiply(const TileMap& A, const TileMap& X, const Work& work, float* row_parts,
                         float* column_parts) {
  extern __shared__ unsigned char memory[];
  Shared& shared =
      *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t{1023});
  const int warp = threadIdx.x / 32;
  const Lane lane(threadIdx.x % 32);
  Ring ring(shared);
  if (threadIdx.x == 0) ring.initialize();
  __syncthreads();
  const auto begin = static_cast<int>(work.first_of(blockIdx.x));
  const auto end = static_cast<int>(work.first_of(blockIdx.x + 1));
  if (warp == kComputing) {
    if (lane.index != 0) return;
    for (int i = begin; i < end; ++i) {
      const TriangleTile square(i);
      for_each_tile(square, [&](int c, int r) {
        ring.load(A, X, 2 * square.row + r, 2 * square.column + c);
      });
    }
  } else if (warp < kOfRows) {
    const int first = 32 * warp;
    Sum sums[2][2];
    for (int i = begin; i < end; ++i) {
      const TriangleTile square(i);
      for_each_tile(square, [&](int, int r) {
        multiply_rows(sums[r], ring.next(), first, lane);
        ring.release(lane.index);
      });
      if (square.column < square.row && i + 1 < end) continue;
      float* part = row_parts + (int64_t{blockIdx.x} + square.row) * kPart;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int row = r * kTile + first + 16 * m + lane.vector;
          sums[r][m].store(part, row, row + 8, lane.t);
          sums[r][m] = Sum();
        }
      }
    }
  } else {
    const int box = warp - kOfRows;
    for (int i = begin; i < end; ++i) {
      const TriangleTile square(i);
      Sum sums[2];
      for_each_tile(square, [&](int c, int r) {
        const bool is_diagonal = square.column == square.row && c == r;
        const Stage& stage = ring.next();
        if (!is_diagonal) multiply_columns(sums, stage, box, lane);
        ring.release(lane.index);
        if (r == 0 || is_diagonal) return;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int column = c * kTile + box * kBoxColumns + 4 * lane.g + 2 * m;
          sums[m].store(column_parts + int64_t{i} * kPart, column, column + 1, lane.t);
          sums[m] = Sum();
        }
      });
    }
  }
}

#endif

__global__ void __launch_bounds__(kThreads, 1)
    multiply_kernel(const __grid_constant__ TileMap A, const __grid_constant__ TileMap X, Work work,
                    float* row_parts, float* column_parts) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  multiply(A, X, work, row_parts, column_parts);
#endif
}

// Y at the rows of a square: the sum of all parts, in float64.
__global__ void __launch_bounds__(kQuadruples* kGroups)
    add_parts_kernel(SymmetricBlockProduct a, Work work, int square_rows, const float* row_parts,
                     const float* column_parts) {
  __shared__ double sums[kGroups][4 * kQuadruples];
  const int group = threadIdx.x / kQuadruples;
  const int place = threadIdx.x % kQuadruples;
  const int first = 4 * kQuadruples * blockIdx.x;  // of a part
  const int row = blockIdx.y;
  double sum[4] = {};
  const auto add = [&](const float* parts, int64_t index) {
    const float4 x = reinterpret_cast<const float4*>(parts + index * kPart + first)[place];
    sum[0] += x.x;
    sum[1] += x.y;
    sum[2] += x.z;
    sum[3] += x.w;
  };
  const int64_t first_square = triangle_tiles(row);
  const int last = work.block_of(first_square + row);
  for (int block = work.block_of(first_square) + group; block <= last; block += kGroups) {
    add(row_parts, int64_t{block} + row);
  }
  // The square on the diagonal has a part of its first columns only.
  const int above = first < kPart / 2 ? row : row + 1;
#pragma unroll 4
  for (int below = above + group; below < square_rows; below += kGroups) {
    add(column_parts, int64_t{triangle_tiles(below)} + row);
  }
  for (int i = 0; i < 4; ++i) sums[group][4 * place + i] = sum[i];
  __syncthreads();
  if (threadIdx.x >= 4 * kQuadruples) return;
  double total = 0;
  for (int g = 0; g < kGroups; ++g) total += sums[g][threadIdx.x];
  const int element = first + threadIdx.x;
  const int64_t i = int64_t{row} * kSquare + element / kVectors;
  const int k = vector_of(element % kVectors);
  if (i < a.n && k < a.count) a.Y[k * a.n + i] = static_cast<float>(total);
}

}  // namespace

bool has_symmetric_block_product(int major, int minor, int shared_bytes) {
  return has_hopper_kernel(major, minor, shared_bytes, kSharedBytes);
}

cudaError_t symmetric_block_product_workspace(int64_t n, int64_t& numbers) {
  int processors = 0;
  const cudaError_t error = count_processors(processors);
  const int rows = square_rows_of(n);
  numbers = (processors + rows + int64_t{triangle_tiles(rows)}) * kPart;
  return error;
}

cudaError_t symmetric_block_product(const SymmetricBlockProduct& arguments, cudaStream_t stream) {
  TileMap A, X;
  int processors = 0;
  cudaError_t error = count_processors(processors);
  if (error == cudaSuccess) {
    error = make_tile_map(arguments.A, arguments.n, arguments.n, kTile, A);
  }
  if (error == cudaSuccess) {
    error = make_tile_map(arguments.X, arguments.count, arguments.n, kVectors, X);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(multiply_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kSharedBytes);
  }
  if (error != cudaSuccess) return error;
  const int square_rows = square_rows_of(arguments.n);
  const int64_t squares = triangle_tiles(square_rows);
  const Work work{squares, static_cast<int>(squares < processors ? squares : processors)};
  float* const row_parts = arguments.workspace;
  float* const column_parts = row_parts + (int64_t{processors} + square_rows) * kPart;
  multiply_kernel<<<work.blocks, kThreads, kSharedBytes, stream>>>(A, X, work, row_parts,
                                                                   column_parts);
  const dim3 grid(kPart / (4 * kQuadruples), square_rows);
  add_parts_kernel<<<grid, kQuadruples * kGroups, 0, stream>>>(arguments, work, square_rows,
                                                               row_parts, column_parts);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
