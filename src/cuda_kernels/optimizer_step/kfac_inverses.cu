#include "cuda_kernels/common/element_access.cuh"
#include "cuda_kernels/optimizer_step/kfac_inverses.h"

#include <cfloat>

namespace torchium::cuda_kernels {
namespace {

// Mean of the diagonal of a matrix, not below `floor`, in all threads.
__device__ double mean_diagonal(const float* matrices, int group, int n, bool is_diagonal,
                                double floor) {
  __shared__ double sums[kElementThreads];
  const int64_t stride = is_diagonal ? 1 : n + 1;
  const float* first = matrices + int64_t{group} * n * (is_diagonal ? 1 : n);
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kElementThreads) sum += first[i * stride];
  __syncthreads();  // all threads have read the last sum
  sums[threadIdx.x] = sum;
  for (int half = kElementThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  __syncthreads();
  const double mean = sums[0] / n, smallest = fmax(floor, double{FLT_MIN});
  return mean > smallest ? mean : smallest;
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    damp_kernel(const __grid_constant__ Table<DampingEntry, bytes> layers, bool uses_pi) {
  const int tile = layers.first_tile + static_cast<int>(blockIdx.x);
  const DampingEntry& entry = entry_of_tile(layers, tile);
  const int group = tile - entry.first_tile;
  double pi = 1;
  if (uses_pi) {
    const double A = mean_diagonal(entry.A, group, entry.A_order, entry.A_is_diagonal, entry.floor);
    const double G = mean_diagonal(entry.G, group, entry.G_order, entry.G_is_diagonal, entry.floor);
    pi = sqrt(A / G);
  }
  if (threadIdx.x != 0) return;
  entry.A_damping[group] = fmax(pi * entry.root_damping, entry.floor);
  entry.G_damping[group] = fmax(entry.root_damping / pi, entry.floor);
}

__device__ void take_eigenvalues(const InverseEntry& entry) {
  for (int i = static_cast<int>(threadIdx.x); i < entry.groups * entry.order;
       i += kElementThreads) {
    const int group = i / entry.order;
    const double value = entry.new_eigenvalues[i];
    if (entry.accepted[group] && entry.other[group]) {
      entry.eigenvalues[i] = static_cast<float>(value < entry.floor ? entry.floor : value);
    }
  }
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    take_kernel(const __grid_constant__ Table<InverseEntry, bytes> factors, const bool* keep) {
  if (keep != nullptr && !*keep) return;
  const int tile = factors.first_tile + static_cast<int>(blockIdx.x);
  const InverseEntry& entry = entry_of_tile(factors, tile);
  const int64_t begin = int64_t{tile - entry.first_tile} * kInverseTile;
  const int64_t end = min(begin + kInverseTile, entry.groups * entry.elements);
  for (int64_t i = begin + threadIdx.x; i < end; i += kElementThreads) {
    const int64_t group = i / entry.elements;
    if (entry.accepted[group] && entry.other[group]) entry.root[i] = entry.new_root[i];
  }
  if (tile != entry.first_tile) return;
  if (entry.eigenvalues != nullptr) take_eigenvalues(entry);
  if (threadIdx.x != 0) return;
  bool all = true;
  for (int group = 0; group < entry.groups; ++group) all &= entry.accepted[group];
  *entry.failures = all ? 0 : *entry.failures + 1;
}

}  // namespace

cudaError_t damp_factors(const Table<DampingEntry>& layers, bool uses_pi, cudaStream_t stream) {
  return launch_shortest(layers, [&](const auto& table) {
    damp_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table, uses_pi);
  });
}

cudaError_t take_inverses(const Table<InverseEntry>& factors, const bool* keep,
                          cudaStream_t stream) {
  return launch_shortest(factors, [&](const auto& table) {
    take_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table, keep);
  });
}

}  // namespace torchium::cuda_kernels
