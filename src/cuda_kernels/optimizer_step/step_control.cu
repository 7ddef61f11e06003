#include "cuda_kernels/optimizer_step/message_slots.h"
#include "cuda_kernels/optimizer_step/step_control.h"
#include "cuda_kernels/split_gemm/split_fp16.cuh"

#include <cfloat>
#include <climits>

namespace torchium::cuda_kernels {
namespace {

constexpr int kControlThreads = 256;

// The largest magnitude in 16 bytes of numbers, as bits without the sign, which have the order of
// the magnitudes; NaN is above Inf.
template <typename Bits>
__device__ Bits largest_of(const uint4& bytes, Bits magnitude) {
  const auto* values = reinterpret_cast<const Bits*>(&bytes);
  Bits most = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(bytes) / sizeof(Bits)); ++i) {
    most = max(most, static_cast<Bits>(values[i] & magnitude));
  }
  return most;
}

template <typename Bits, typename Entry>
__device__ Bits largest_of_tile(const Entry& entry, const void* address, int64_t begin,
                                Bits magnitude) {
  constexpr int kPerVector = sizeof(uint4) / sizeof(Bits);
  const bool in_rows = entry.columns != 0;
  const int64_t row = in_rows ? begin / entry.columns : 0;
  const auto* data = static_cast<const Bits*>(address) + (in_rows ? row * entry.row_stride : begin);
  const auto column = static_cast<unsigned>(in_rows ? begin - row * entry.columns : 0);
  const auto offset = [&](unsigned i) -> int64_t {  // of element begin + i
    if (!in_rows) return i;
    const unsigned place = column + i, columns = entry.columns;
    return place / columns * entry.row_stride + place % columns;
  };
  const auto count = static_cast<unsigned>(min(entry.elements - begin, kScanTile));
  const bool by_vectors = reinterpret_cast<uintptr_t>(address) % sizeof(uint4) == 0 &&
                          entry.columns % kPerVector == 0 && entry.row_stride % kPerVector == 0;
  Bits most = 0;
  unsigned i = 0;
  if (by_vectors) {
    const unsigned vectors_end = count / kPerVector * kPerVector;
#pragma unroll 4
    for (i = threadIdx.x * kPerVector; i < vectors_end; i += kElementThreads * kPerVector) {
      most = max(most, largest_of(*reinterpret_cast<const uint4*>(data + offset(i)), magnitude));
    }
    i = vectors_end;
  }
  for (i += threadIdx.x; i < count; i += kElementThreads) {
    most = max(most, static_cast<Bits>(data[offset(i)] & magnitude));
  }
  return most;
}

// As a double, which holds the magnitudes of all types.
template <typename Entry>
__device__ double largest_magnitude(const Entry& entry, const void* data, int64_t begin) {
  switch (entry.type) {
    case ElementType::kDouble:
      return __longlong_as_double(
          static_cast<int64_t>(largest_of_tile<uint64_t>(entry, data, begin, 0x7fffffffffffffff)));
    case ElementType::kBFloat16:
      return __uint_as_float(unsigned{largest_of_tile<uint16_t>(entry, data, begin, 0x7fff)} << 16);
    case ElementType::kHalf:
      return __half2float(__ushort_as_half(
          static_cast<unsigned short>(largest_of_tile<uint16_t>(entry, data, begin, 0x7fff))));
    default:
      return __uint_as_float(largest_of_tile<uint32_t>(entry, data, begin, 0x7fffffff));
  }
}

template <int bytes>
__global__ void __launch_bounds__(kControlThreads)
    initialize_kernel(const __grid_constant__ Table<GradientEntry, bytes> gradients,
                      StepControl* control, StepNumbers* numbers) {
  const int i = static_cast<int>(blockIdx.x) * kControlThreads + static_cast<int>(threadIdx.x);
  const int parameter = gradients.first_tile + i;
  if (i < gradients.count) {
    StepNumbers& its = numbers[parameter];
    its = {};
    its.gradient = gradients.entries[i].data;
    its.gradient_stride = gradients.entries[i].row_stride;
    if (const unsigned* largest = gradients.entries[i].largest) {
      its.largest[static_cast<int>(ScanKind::kGradient)] = *largest;
      its.is_examined = 1;
    }
  }
  if (parameter > 0) return;
  *control = {};
  control->first_unfit = INT_MAX;
}

// Whether a step can work with this magnitude; false for NaN.
__device__ bool fits_step(double most, const double* step, double limit) {
  const double t = step == nullptr ? 1.0 : *step + 1.0;
  return most * sqrt(t) <= limit;
}

// Raises `largest` to the magnitude of a tile, or to zero where the step cannot work with that.
// Returns whether it can.
template <typename Entry>
__device__ bool examine_tile(const Entry& entry, const void* data, int tile, double limit,
                             unsigned* largest) {
  const double most = largest_magnitude(entry, data, (tile - entry.first_tile) * kScanTile);
  const bool fits = fits_step(most, entry.step, limit);
  record_largest(__float_as_uint(fits ? fminf(static_cast<float>(most), FLT_MAX) : 0), largest);
  return fits;
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    scan_kernel(const __grid_constant__ Table<ScanEntry, bytes> entries, StepControl* control,
                StepNumbers* numbers) {
  const int tile = entries.first_tile + static_cast<int>(blockIdx.x);
  const ScanEntry& entry = entry_of_tile(entries, tile);
  if (entry.data == nullptr && numbers[entry.index].is_examined) return;
  const void* data = entry.data == nullptr ? numbers[entry.index].gradient : entry.data;
  const bool fits = examine_tile(entry, data, tile, entry.largest,
                                 &numbers[entry.index].largest[static_cast<int>(entry.kind)]);
  if (!fits && entry.kind != ScanKind::kAverage) {
    atomicMin(&control->first_unfit, entry.index);
  }
}

template <int bytes>
__global__ void __launch_bounds__(kElementThreads)
    examine_kernel(const __grid_constant__ Table<GivenEntry, bytes> entries, int* unfit,
                   unsigned* largest) {
  const int tile = entries.first_tile + static_cast<int>(blockIdx.x);
  const GivenEntry& entry = entry_of_tile(entries, tile);
  const bool fits = examine_tile(entry, entry.data, tile, entry.limit, &largest[entry.place]);
  if (!fits) atomicMax(&unfit[entry.group], static_cast<int>(kMost) - entry.parameter);
}

__global__ void decide_step_kernel(StepRule rule, StepControl* control, const float* found_inf,
                                   int64_t* status) {
  const bool overflow = found_inf != nullptr && *found_inf != 0;
  const bool fits = control->first_unfit == INT_MAX, keep = fits && !overflow;
  if (!overflow) status[kConsecutiveSkips] = fits ? 0 : status[kConsecutiveSkips] + 1;
  status[kTotalSkips] += keep ? 0 : 1;
  status[kNonFiniteParameter] = fits || overflow ? -1 : control->first_unfit;
  control->keep = keep;
  const bool is_sum = rule.beta2 == 1;
  const double alpha = !keep ? 0 : is_sum ? 1 : 1 - rule.beta2;
  const auto beta = static_cast<float>(!keep || is_sum ? 1 : rule.beta2);
  control->update = {static_cast<float>(alpha), beta};
}

// The scales of g and m as fp16 parts, from the bounds of both.
__device__ void choose_scales(const StepRule& rule, StepNumbers& numbers) {
  const auto largest = [&](ScanKind kind) {
    return double{__uint_as_float(numbers.largest[static_cast<int>(kind)])};
  };
  const double gradient =
      largest(ScanKind::kGradient) + fabs(rule.weight_decay) * largest(ScanKind::kParameter);
  // m = (beta1 m' + (1 - beta1) g) / (1 - beta1^t)
  const double average =
      gradient + (rule.beta1 < 1 ? rule.beta1 / (1 - rule.beta1) : 0) * largest(ScanKind::kAverage);
  numbers.gradient_scale = scale_for(static_cast<float>(gradient));
  numbers.average_scale = scale_for(static_cast<float>(average));
}

__device__ double correction(double beta, double t) { return beta == 1 ? 1 : 1 - pow(beta, t); }

template <int bytes>
__global__ void __launch_bounds__(kControlThreads)
    advance_steps_kernel(StepRule rule, const __grid_constant__ Table<StepEntry, bytes> steps,
                         const StepControl* control, StepNumbers* numbers) {
  const int i = static_cast<int>(blockIdx.x) * kControlThreads + static_cast<int>(threadIdx.x);
  if (i >= steps.count) return;
  double* step = steps.entries[i].step;
  const double t = *step + (control->keep ? 1 : 0);
  *step = t;
  const auto since = [&](const double* start) {
    return fmax(start == nullptr ? t : t - *start, 1.0);
  };
  StepNumbers& its = numbers[steps.first_tile + i];
  its.exp_avg = correction(rule.beta1, since(steps.entries[i].exp_avg_start));
  its.second_moment = correction(rule.moment_beta, since(steps.entries[i].second_moment_start));
  its.statistics = correction(rule.beta2, since(nullptr));
  its.started = t >= rule.start ? 1.0 : 0.0;
  choose_scales(rule, its);
}

// One block. Of equal counts the first entry's.
template <int bytes>
__global__ void __launch_bounds__(kControlThreads)
    record_failures_kernel(const __grid_constant__ Table<FailureEntry, bytes> table,
                           int64_t* status, bool is_first) {
  __shared__ unsigned long long largest;  // count, then how far its entry is from the end
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  unsigned long long mine = 0;
  for (int i = static_cast<int>(threadIdx.x); i < table.count; i += kControlThreads) {
    int most = 0;
    for (int j = 0; j < table.entries[i].matrices; ++j) {
      most = max(most, table.entries[i].failures[j]);
    }
    mine = max(mine, static_cast<unsigned long long>(most) << 32 | (table.count - i));
  }
  atomicMax(&largest, mine);
  __syncthreads();
  if (threadIdx.x != 0) return;
  const auto count = static_cast<int64_t>(largest >> 32);
  if (is_first || count > status[kConsecutiveRootFailures]) {
    const int entry = table.count - static_cast<int>(largest & 0xffffffff);
    status[kConsecutiveRootFailures] = count;
    status[kFailedParameter] = count > 0 ? table.entries[entry].index : -1;
  }
}

}  // namespace

cudaError_t initialize_control(const Table<GradientEntry>& gradients, StepControl* control,
                               StepNumbers* numbers, cudaStream_t stream) {
  const int blocks = (gradients.count + kControlThreads - 1) / kControlThreads;
  return launch_shortest(gradients, [&](const auto& table) {
    initialize_kernel<<<blocks, kControlThreads, 0, stream>>>(table, control, numbers);
  });
}

cudaError_t scan(const Table<ScanEntry>& entries, StepControl* control, StepNumbers* numbers,
                 cudaStream_t stream) {
  return launch_shortest(entries, [&](const auto& table) {
    scan_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table, control, numbers);
  });
}

cudaError_t examine(const Table<GivenEntry>& entries, int* unfit, unsigned* largest,
                    cudaStream_t stream) {
  return launch_shortest(entries, [&](const auto& table) {
    examine_kernel<<<table.tiles(), kElementThreads, 0, stream>>>(table, unfit, largest);
  });
}

cudaError_t decide_step(const StepRule& rule, StepControl* control, const float* found_inf,
                        int64_t* status, cudaStream_t stream) {
  decide_step_kernel<<<1, 1, 0, stream>>>(rule, control, found_inf, status);
  return cudaGetLastError();
}

cudaError_t advance_steps(const StepRule& rule, const Table<StepEntry>& steps,
                          const StepControl* control, StepNumbers* numbers, cudaStream_t stream) {
  const int blocks = (steps.count + kControlThreads - 1) / kControlThreads;
  return launch_shortest(steps, [&](const auto& table) {
    advance_steps_kernel<<<blocks, kControlThreads, 0, stream>>>(rule, table, control, numbers);
  });
}

cudaError_t record_failures(const Table<FailureEntry>& entries, int64_t* status, bool is_first,
                            cudaStream_t stream) {
  return launch_shortest(entries, [&](const auto& table) {
    record_failures_kernel<<<1, kControlThreads, 0, stream>>>(table, status, is_first);
  });
}

}  // namespace torchium::cuda_kernels
