#include "cuda_kernels/optimizer_step/kfac_step.h"
#include "cuda_kernels/optimizer_step/parameter_update.cuh"

namespace torchium::cuda_kernels {
namespace {

// An element of a parameter.
struct Place {
  int64_t in_param, packed;
  int row, diagonal;  // where the roots that are diagonals have its factors
};

// body(place) for every element of the tile.
template <typename Body>
__device__ void for_each_place(const KfacEntry& entry, int tile, const Body& body) {
  const int begin = (tile - entry.first_tile) * kKfacTile;
  const int end = min(entry.rows * entry.columns - begin, kKfacTile) + begin;
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kElementThreads) {
    const int row = i / entry.columns, column = i % entry.columns;
    const int packed = entry.first_column + column;
    body(Place{int64_t{row} * entry.row_stride +
                   int64_t{column / entry.inner} * entry.outer_stride +
                   int64_t{column % entry.inner} * entry.inner_stride,
               int64_t{row} * entry.packed_columns + packed, row,
               row / entry.group_rows * entry.packed_columns + packed});
  }
}

// An element of V.
__device__ float gradient(const KfacEntry& entry, int64_t offset) {
  return penalized_gradient<1>(entry, entry.grad, entry.maximize, entry.weight_decay, offset)
      .lane[0];
}

template <typename Entry>
__device__ float by_diagonals(const Entry& entry, float x, int row, int diagonal) {
  if (entry.left != nullptr) x *= entry.left[row];
  return entry.right == nullptr ? x : x * entry.right[diagonal];
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    gather_kernel(const __grid_constant__ Table<KfacEntry, bytes> parameters,
                  const StepControl* control) {
  const int tile = parameters.first_tile + static_cast<int>(blockIdx.x);
  const KfacEntry& entry = entry_of_tile(parameters, tile);
  if (entry.gathered == nullptr) return;
  const bool keep = control->keep;
  for_each_place(entry, tile, [&](const Place& place) {
    const float g = keep ? gradient(entry, place.in_param) : 0;
    entry.gathered[place.packed] = by_diagonals(entry, g, place.row, place.diagonal);
  });
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    eigenvalues_kernel(const __grid_constant__ Table<EigenvalueEntry, bytes> layers) {
  const int tile = layers.first_tile + static_cast<int>(blockIdx.x);
  const EigenvalueEntry& entry = entry_of_tile(layers, tile);
  const int begin = (tile - entry.first_tile) * kKfacTile;
  const int end = min(entry.elements - begin, kKfacTile) + begin;
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += kElementThreads) {
    const int row = i / entry.columns, column = i % entry.columns;
    const int diagonal = row / entry.group_rows * entry.columns + column;
    const float left = entry.left_values[row];
    const float damped = left < 0 ? 1 : left * entry.right_values[diagonal] + entry.damping;
    entry.rotated[i] = by_diagonals(entry, entry.rotated[i] / damped, row, diagonal);
  }
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    products_kernel(const __grid_constant__ Table<KfacEntry, bytes> parameters, double* products) {
  const int tile = parameters.first_tile + static_cast<int>(blockIdx.x);
  const KfacEntry& entry = entry_of_tile(parameters, tile);
  float sum = 0;
  if (entry.gathered != nullptr) {
    for_each_place(entry, tile, [&](const Place& place) {
      sum = fmaf(entry.direction[place.packed], gradient(entry, place.in_param), sum);
    });
  }
  sum = sum_of_block(sum);
  if (threadIdx.x != 0) return;
  const double lr = learning_rate(entry.lr);
  products[tile] = lr * lr * sum;
}

// One block, which adds in an order that never changes.
__global__ void __launch_bounds__(kElementThreads)
    clip_kernel(const double* products, int tiles, double kl_clip, float* scale) {
  __shared__ double sums[kElementThreads];
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < tiles; i += kElementThreads) sum += products[i];
  sums[threadIdx.x] = sum;
  for (int half = kElementThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x != 0) return;
  const double nu = sqrt(kl_clip / fabs(sums[0]));
  *scale = nu < 1 ? static_cast<float>(nu) : 1;  // 1 for NaN, as on the CPU
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    update_kernel(const __grid_constant__ Table<KfacEntry, bytes> parameters,
                  const StepControl* control, const float* scale) {
  if (!control->keep) return;
  const int tile = parameters.first_tile + static_cast<int>(blockIdx.x);
  const KfacEntry& entry = entry_of_tile(parameters, tile);
  const bool has_layer = entry.gathered != nullptr;
  const float nu = has_layer && scale != nullptr ? *scale : 1;
  const UpdateFactors factors{.lr = static_cast<float>(learning_rate(entry.lr)),
                              .decoupled_weight_decay = 0,
                              .momentum = entry.momentum,
                              .nesterov = false};
  for_each_place(entry, tile, [&](const Place& place) {
    const float d =
        has_layer ? nu * entry.direction[place.packed] : gradient(entry, place.in_param);
    move_parameter<1>(factors, entry.param, entry.param_type, entry.momentum_buffer, place.in_param,
                      {d});
  });
}

constexpr int kAddressThreads = 128;

template <int bytes>
__global__ void __launch_bounds__(kAddressThreads)
    addresses_kernel(const __grid_constant__ Table<AddressEntry, bytes> entries,
                     AddressArrays arrays) {
  const AddressEntry& entry = entries.entries[blockIdx.x];
  const int64_t rows = entry.rows, columns = entry.columns;
  for (int i = static_cast<int>(threadIdx.x); i < entry.count; i += kAddressThreads) {
    arrays.front[entry.place + i] = entry.front + i * rows * columns;
    arrays.back[entry.place + i] = entry.back + i * rows * columns;
    arrays.left[entry.place + i] = entry.left + i * rows * rows;
    arrays.right[entry.place + i] = entry.right + i * columns * columns;
  }
}

}  // namespace

cudaError_t gather_kfac(const Table<KfacEntry>& parameters, const StepControl* control,
                        cudaStream_t stream) {
  return launch_shortest(parameters, [&](const auto& table) {
    gather_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table, control);
  });
}

cudaError_t divide_by_eigenvalues(const Table<EigenvalueEntry>& layers, cudaStream_t stream) {
  return launch_shortest(layers, [&](const auto& table) {
    eigenvalues_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table);
  });
}

cudaError_t sum_products(const Table<KfacEntry>& parameters, double* products,
                         cudaStream_t stream) {
  return launch_shortest(parameters, [&](const auto& table) {
    products_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table, products);
  });
}

cudaError_t clip_by_products(const double* products, int tiles, double kl_clip, float* scale,
                             cudaStream_t stream) {
  clip_kernel<<<1, kElementThreads, 0, stream>>>(products, tiles, kl_clip, scale);
  return cudaGetLastError();
}

cudaError_t update_by_kfac(const Table<KfacEntry>& parameters, const StepControl* control,
                           const float* scale, cudaStream_t stream) {
  return launch_shortest(parameters, [&](const auto& table) {
    update_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table, control, scale);
  });
}

cudaError_t write_addresses(const Table<AddressEntry>& entries, const AddressArrays& arrays,
                            cudaStream_t stream) {
  return launch_shortest(entries, [&](const auto& table) {
    addresses_kernel<<<table.tiles(), kAddressThreads, 0, stream>>>(table, arrays);
  });
}

}  // namespace torchium::cuda_kernels
