#include "cuda_kernels/optimizer_step/adagrad_step.h"
#include "cuda_kernels/optimizer_step/parameter_update.cuh"

namespace torchium::cuda_kernels {
namespace {

template <int N>
__device__ void update_elements(const AdagradRule& rule, const AdagradEntry& entry,
                                const void* grad, float lr, int64_t offset) {
  const Lanes<N> g = penalized_gradient<N>(entry, grad, rule.maximize, rule.weight_decay, offset);
  Lanes<N> sum = load_floats<N>(entry.sum, offset);
  Lanes<N> d;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sum.lane[i] = fmaf(g.lane[i], g.lane[i], sum.lane[i]);
    const float root = sqrtf(sum.lane[i]) + rule.eps;
    d.lane[i] = root > 0 ? g.lane[i] / root : 0;  // 0 / 0 becomes 0
  }
  store_floats<N>(entry.sum, offset, sum);
  move_parameter<N>({.lr = lr}, entry.param, entry.param_type, offset, nullptr, offset, d);
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    adagrad_kernel(AdagradRule rule, const __grid_constant__ Table<AdagradEntry, bytes> parameters,
                   const StepControl* control, const StepNumbers* numbers, LearningRate lr) {
  if (!control->keep) return;
  const int tile = parameters.first_tile + static_cast<int>(blockIdx.x);
  const AdagradEntry& entry = entry_of_tile(parameters, tile);
  const void* grad = numbers[entry.index].gradient;
  const auto rate = static_cast<float>(learning_rate(lr) / (1 + (*entry.step - 1) * rule.lr_decay));
  const int64_t begin = (tile - entry.first_tile) * kAdagradTile;
  const int64_t end = min(begin + kAdagradTile, entry.elements);
  int64_t i = begin;
  if (entry.by_fours) {
    const int64_t fours_end = begin + (end - begin) / 4 * 4;
    for (i += 4 * threadIdx.x; i < fours_end; i += 4 * kElementThreads) {
      update_elements<4>(rule, entry, grad, rate, i);
    }
    i = fours_end;
  }
  for (i += threadIdx.x; i < end; i += kElementThreads)
    update_elements<1>(rule, entry, grad, rate, i);
}

}  // namespace

cudaError_t update_by_adagrad(const AdagradRule& rule, const Table<AdagradEntry>& parameters,
                              const StepControl* control, const StepNumbers* numbers,
                              const LearningRate& lr, cudaStream_t stream) {
  return launch_shortest(parameters, [&](const auto& table) {
    adagrad_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(rule, table, control, numbers,
                                                                  lr);
  });
}

}  // namespace torchium::cuda_kernels
