#include "cuda_kernels/common/triangle.cuh"
#include "cuda_kernels/optimizer_step/kfac_step.h"
#include "cuda_kernels/optimizer_step/parameter_update.cuh"
#include "cuda_kernels/split_gemm/split_fp16.cuh"

#include <cfloat>

namespace torchium::cuda_kernels {
namespace {

constexpr int kCountThreads = 256;

template <int bytes>
__global__ void __launch_bounds__(kCountThreads)
    count_kernel(const __grid_constant__ Table<FactorEntry, bytes> factors,
                 const StepControl* control) {
  const int i = static_cast<int>(blockIdx.x) * kCountThreads + static_cast<int>(threadIdx.x);
  if (i >= factors.count || !control->keep) return;
  const FactorEntry& entry = factors.entries[i];
  if (entry.counts && entry.sum != nullptr) *entry.updates += 1;
}

// One tile of a symmetric matrix, and its mirror image.
template <typename Average>
__device__ void update_symmetric(const FactorEntry& entry, int tile, const Average& average) {
  constexpr int kRows = kElementThreads / kFactorSide;  // at a time
  __shared__ float mirrored[kFactorSide][kFactorSide + 1];
  const int n = entry.order, tiles = triangle_tiles((n + kFactorSide - 1) / kFactorSide);
  const TriangleTile place(tile % tiles);
  const int64_t first = int64_t{tile / tiles} * n * n;
  const int x = static_cast<int>(threadIdx.x) % kFactorSide;
  const int y = static_cast<int>(threadIdx.x) / kFactorSide;
  const int row = place.row * kFactorSide, column = place.column * kFactorSide;
#pragma unroll 8
  for (int r = y; r < kFactorSide; r += kRows) {
    if (row + r >= n || column + x >= n) continue;
    const int64_t i = first + int64_t{row + r} * n + column + x;
    const float value = average(i);
    entry.factor[i] = value;
    mirrored[x][r] = value;
  }
  if (row == column) return;
  __syncthreads();
#pragma unroll 8
  for (int r = y; r < kFactorSide; r += kRows) {
    if (row + x >= n) continue;  // no tile left of the diagonal ends at the last column
    entry.factor[first + int64_t{column + r} * n + row + x] = mirrored[r][x];
  }
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    factors_kernel(const __grid_constant__ Table<FactorEntry, bytes> factors,
                   const StepControl* control) {
  const int tile = factors.first_tile + static_cast<int>(blockIdx.x);
  const FactorEntry& entry = entry_of_tile(factors, tile);
  if (entry.sum == nullptr || !control->keep) return;
  const double d = fmin(1 - 1 / double{*entry.updates}, entry.stat_decay);
  const auto decay = static_cast<float>(d), weight = static_cast<float>((1 - d) * entry.scale);
  const auto average = [&](int64_t i) {
    return fmaf(weight, entry.sum[i], decay * entry.factor[i]);
  };
  if (entry.order > 0) {
    update_symmetric(entry, tile - entry.first_tile, average);
    return;
  }
  const int64_t begin = int64_t{tile - entry.first_tile} * kFactorTile;
  const int64_t end = min(begin + kFactorTile, entry.elements);
  for (int64_t i = begin + threadIdx.x; i < end; i += kElementThreads) {
    entry.factor[i] = average(i);
  }
}

// An element of a parameter.
struct Place {
  int64_t in_param, packed;
  int row, column;  // of V
};

// body(place) for every element of the tile. Divisions of integers take longer than an element of
// memory.
template <typename Body>
__device__ void for_each_place(const KfacEntry& entry, int tile, const Body& body) {
  const int begin = (tile - entry.first_tile) * kKfacTile;
  const int end = min(entry.rows * entry.columns - begin, kKfacTile) + begin;
  const int first = begin + static_cast<int>(threadIdx.x), columns = entry.columns;
  const int more_rows = kElementThreads / columns, more_columns = kElementThreads % columns;
  int row = first / columns, column = first % columns;
#pragma unroll 4
  for (int i = first; i < end; i += kElementThreads) {
    const int outer = entry.inner == 1 ? column : column / entry.inner;
    const int packed = entry.first_column + column;
    body(Place{int64_t{row} * entry.row_stride + int64_t{outer} * entry.outer_stride +
                   int64_t{column - outer * entry.inner} * entry.inner_stride,
               int64_t{row} * entry.packed_columns + packed, row, packed});
    row += more_rows;
    column += more_columns;
    if (column >= columns) {
      column -= columns;
      ++row;
    }
  }
}

// An element of V.
__device__ float gradient(const KfacEntry& entry, const StepNumbers* numbers, int64_t offset) {
  return penalized_gradient<1>(entry, numbers[entry.index].gradient, entry.maximize,
                               entry.weight_decay, offset)
      .lane[0];
}

template <typename Entry>
__device__ float* matrix_of(const Entry& entry, const KfacBuffers& buffers) {
  return (entry.in_second ? buffers.second : buffers.first) + entry.start;
}

template <typename Entry>
__device__ float by_diagonals(const Entry& entry, float x, int row, int diagonal) {
  if (entry.left != nullptr) x *= entry.left[row];
  return entry.right == nullptr ? x : x * entry.right[diagonal];
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    gather_kernel(const __grid_constant__ Table<KfacEntry, bytes> parameters,
                  const StepControl* control, const StepNumbers* numbers, KfacBuffers buffers) {
  const int tile = parameters.first_tile + static_cast<int>(blockIdx.x);
  const KfacEntry& entry = entry_of_tile(parameters, tile);
  if (entry.start < 0) return;
  const bool keep = control->keep;
  float* V = buffers.first + entry.start;
  unsigned most = 0;
  for_each_place(entry, tile, [&](const Place& place) {
    const float g = keep ? gradient(entry, numbers, place.in_param) : 0;
    const int group = entry.right == nullptr ? 0 : place.row / entry.group_rows;
    const int diagonal = group * entry.packed_columns + place.column;
    V[place.packed] = by_diagonals(entry, g, place.row, diagonal);
    most = max(most, magnitude_bits(g));
  });
  if (entry.largest != nullptr) record_largest(most, entry.largest);
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    eigenvalues_kernel(const __grid_constant__ Table<EigenvalueEntry, bytes> layers,
                       KfacBuffers buffers) {
  const int tile = layers.first_tile + static_cast<int>(blockIdx.x);
  const EigenvalueEntry& entry = entry_of_tile(layers, tile);
  float* rotated = matrix_of(entry, buffers);
  const int begin = (tile - entry.first_tile) * kKfacTile;
  const int end = min(entry.elements - begin, kKfacTile) + begin;
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kElementThreads) {
    const int row = i / entry.columns, column = i % entry.columns;
    const int diagonal = row / entry.group_rows * entry.columns + column;
    const float left = entry.left_values[row];
    const float damped = left < 0 ? 1 : left * entry.right_values[diagonal] + entry.damping;
    rotated[i] = by_diagonals(entry, rotated[i] / damped, row, diagonal);
  }
}

// With the formula of optim/kfac/unitwise_subset.cpp.
__device__ void solve_block(const float* F, double damping, float* V, float* shift) {
  const double a = fmax(double{F[0]}, 0.0), c = fmax(double{F[3]}, 0.0);
  const double s = fmax(a + c + damping, DBL_MIN);
  const double l = damping / s, p = a / s, q = c / s;
  const double most = sqrt(p * q);
  const double r = shift == nullptr ? 0 : fmax(fmin(F[2] / s, most), -most);
  const double determinant = (most - r) * (most + r) + l * (p + q + l);
  const double u = *V / s, v = shift == nullptr ? 0 : *shift / s;
  *V = static_cast<float>(((q + l) * u - r * v) / determinant);
  if (shift != nullptr) *shift = static_cast<float>(((p + l) * v - r * u) / determinant);
}

template <int bytes>
__global__ void __launch_bounds__(kUnitwiseTile)
    unitwise_kernel(const __grid_constant__ Table<UnitwiseEntry, bytes> norms,
                    KfacBuffers buffers) {
  const int tile = norms.first_tile + static_cast<int>(blockIdx.x);
  const UnitwiseEntry& entry = entry_of_tile(norms, tile);
  const int channel = (tile - entry.first_tile) * kUnitwiseTile + static_cast<int>(threadIdx.x);
  if (channel >= entry.channels) return;
  float* V = buffers.first + entry.scale + channel;
  if (entry.order == 1) {
    *V = static_cast<float>(*V / (fmax(double{entry.blocks[channel]}, 0.0) + entry.damping));
    return;
  }
  float* shift = entry.shift < 0 ? nullptr : buffers.first + entry.shift + channel;
  solve_block(entry.blocks + int64_t{channel} * 4, entry.damping, V, shift);
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    products_kernel(const __grid_constant__ Table<KfacEntry, bytes> parameters,
                    const StepNumbers* numbers, KfacBuffers buffers, double* products) {
  const int tile = parameters.first_tile + static_cast<int>(blockIdx.x);
  const KfacEntry& entry = entry_of_tile(parameters, tile);
  float sum = 0;
  if (entry.start >= 0) {
    const float* direction = matrix_of(entry, buffers);
    for_each_place(entry, tile, [&](const Place& place) {
      sum = fmaf(direction[place.packed], gradient(entry, numbers, place.in_param), sum);
    });
  }
  sum = sum_of_block(sum);
  if (threadIdx.x != 0) return;
  const double lr = learning_rate(entry.lr);
  products[tile] = lr * lr * sum;
}

// One block, which adds in an order that never changes.
__global__ void __launch_bounds__(kElementThreads)
    clip_kernel(const double* products, int count, double kl_clip, double* scale) {
  __shared__ double sums[kElementThreads];
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kElementThreads) sum += products[i];
  sums[threadIdx.x] = sum;
  for (int half = kElementThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x != 0) return;
  const double nu = sqrt(kl_clip / fabs(sums[0]));
  *scale = nu < 1 ? nu : 1;  // 1 for NaN, as on the CPU
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    update_kernel(const __grid_constant__ Table<KfacEntry, bytes> parameters,
                  const StepControl* control, const StepNumbers* numbers, KfacBuffers buffers,
                  const double* scale) {
  if (!control->keep) return;
  const int tile = parameters.first_tile + static_cast<int>(blockIdx.x);
  const KfacEntry& entry = entry_of_tile(parameters, tile);
  const float* direction = entry.start < 0 ? nullptr : matrix_of(entry, buffers);
  const float nu = direction != nullptr && scale != nullptr ? static_cast<float>(*scale) : 1;
  const UpdateFactors factors{.lr = static_cast<float>(learning_rate(entry.lr)),
                              .decoupled_weight_decay = 0,
                              .momentum = entry.momentum,
                              .nesterov = false};
  for_each_place(entry, tile, [&](const Place& place) {
    const float d = direction == nullptr ? gradient(entry, numbers, place.in_param)
                                         : nu * direction[place.packed];
    move_parameter<1>(factors, entry.param, entry.param_type, place.in_param, entry.momentum_buffer,
                      place.in_param, {d});
  });
}

constexpr int kAddressThreads = 128;

template <int bytes>
__global__ void __launch_bounds__(kAddressThreads)
    addresses_kernel(const __grid_constant__ Table<AddressEntry, bytes> entries,
                     KfacBuffers buffers, AddressArrays arrays) {
  const AddressEntry& entry = entries.entries[blockIdx.x];
  const int64_t rows = entry.rows, columns = entry.columns;
  for (int i = static_cast<int>(threadIdx.x); i < entry.count; i += kAddressThreads) {
    arrays.first[entry.place + i] = buffers.first + entry.start + i * rows * columns;
    arrays.second[entry.place + i] = buffers.second + entry.start + i * rows * columns;
    arrays.left[entry.place + i] = entry.left + i * rows * rows;
    arrays.right[entry.place + i] = entry.right + i * columns * columns;
  }
}

}  // namespace

cudaError_t count_factor_updates(const Table<FactorEntry>& factors, const StepControl* control,
                                 cudaStream_t stream) {
  const int blocks = (factors.count + kCountThreads - 1) / kCountThreads;
  return launch_shortest(factors, [&](const auto& table) {
    count_kernel<<<blocks, kCountThreads, 0, stream>>>(table, control);
  });
}

int factor_tiles(int64_t elements, int order) {
  if (order == 0) return static_cast<int>((elements + kFactorTile - 1) / kFactorTile);
  const int64_t groups = elements / (int64_t{order} * order);
  return static_cast<int>(groups * triangle_tiles((order + kFactorSide - 1) / kFactorSide));
}

cudaError_t update_factors(const Table<FactorEntry>& factors, const StepControl* control,
                           cudaStream_t stream) {
  return launch_shortest(factors, [&](const auto& table) {
    factors_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table, control);
  });
}

cudaError_t gather_kfac(const Table<KfacEntry>& parameters, const StepControl* control,
                        const StepNumbers* numbers, const KfacBuffers& buffers,
                        cudaStream_t stream) {
  return launch_shortest(parameters, [&](const auto& table) {
    gather_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table, control, numbers, buffers);
  });
}

cudaError_t divide_by_eigenvalues(const Table<EigenvalueEntry>& layers, const KfacBuffers& buffers,
                                  cudaStream_t stream) {
  return launch_shortest(layers, [&](const auto& table) {
    eigenvalues_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table, buffers);
  });
}

cudaError_t solve_unitwise(const Table<UnitwiseEntry>& norms, const KfacBuffers& buffers,
                           cudaStream_t stream) {
  return launch_shortest(norms, [&](const auto& table) {
    unitwise_kernel<<<table.tiles(), kUnitwiseTile, 0, stream>>>(table, buffers);
  });
}

cudaError_t sum_products(const Table<KfacEntry>& parameters, const StepNumbers* numbers,
                         const KfacBuffers& buffers, double* products, cudaStream_t stream) {
  return launch_shortest(parameters, [&](const auto& table) {
    products_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table, numbers, buffers,
                                                                   products);
  });
}

cudaError_t clip_by_products(const double* products, int count, double kl_clip, double* scale,
                             cudaStream_t stream) {
  clip_kernel<<<1, kElementThreads, 0, stream>>>(products, count, kl_clip, scale);
  return cudaGetLastError();
}

cudaError_t update_by_kfac(const Table<KfacEntry>& parameters, const StepControl* control,
                           const StepNumbers* numbers, const KfacBuffers& buffers,
                           const double* scale, cudaStream_t stream) {
  return launch_shortest(parameters, [&](const auto& table) {
    update_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table, control, numbers, buffers,
                                                                 scale);
  });
}

cudaError_t write_addresses(const Table<AddressEntry>& entries, const KfacBuffers& buffers,
                            const AddressArrays& arrays, cudaStream_t stream) {
  return launch_shortest(entries, [&](const auto& table) {
    addresses_kernel<<<table.tiles(), kAddressThreads, 0, stream>>>(table, buffers, arrays);
  });
}

}  // namespace torchium::cuda_kernels
