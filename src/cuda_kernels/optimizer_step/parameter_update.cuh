// How a step of any optimizer changes a parameter.
#pragma once

#include "cuda_kernels/common/element_access.cuh"
#include "cuda_kernels/optimizer_step/step_control.h"

#include <cfloat>

namespace torchium::cuda_kernels {

__device__ inline double learning_rate(const LearningRate& lr) {
  if (lr.device == nullptr) return lr.host;
  return lr.is_double ? *static_cast<const double*>(lr.device)
                      : double{*static_cast<const float*>(lr.device)};
}

__device__ inline float largest_of(ElementType type) {
  switch (type) {
    case ElementType::kHalf:
      return 65504.0f;
    case ElementType::kBFloat16:
      return 0x1.FEp127f;
    default:
      return FLT_MAX;
  }
}

// NaN stays NaN, as on the CPU: fmaxf() would hide it.
__device__ inline float saturated(float x, float largest) {
  return isnan(x) ? x : fminf(fmaxf(x, -largest), largest);
}

// The gradient, negated for maximize, plus weight_decay times the parameter.
template <int N, typename Entry>
__device__ Lanes<N> penalized_gradient(const Entry& entry, const void* grad, bool maximize,
                                       float weight_decay, int64_t offset) {
  Lanes<N> g = load_elements<N>(grad, entry.grad_type, offset);
  if (maximize) {
#pragma unroll
    for (int i = 0; i < N; ++i) g.lane[i] = -g.lane[i];
  }
  if (weight_decay != 0) {
    const Lanes<N> p = load_elements<N>(entry.param, entry.param_type, offset);
#pragma unroll
    for (int i = 0; i < N; ++i) g.lane[i] = fmaf(weight_decay, p.lane[i], g.lane[i]);
  }
  return g;
}

struct UpdateFactors {
  float lr;
  float decoupled_weight_decay;
  float momentum;
  bool nesterov;
  bool from_zero = false;
};

// p <- (1 - lr wd) p - lr d, or by momentum, which has a buffer that is not null. from_zero: p
// counts as zero. Entries of d that are not finite count as zero, and p stops at the largest number
// of its type. `in_param`, `offset`: of the elements in the parameter, and in the buffer.
template <int N>
__device__ void move_parameter(const UpdateFactors& factors, void* param, ElementType type,
                               int64_t in_param, float* momentum_buffer, int64_t offset,
                               Lanes<N> d) {
  Lanes<N> p = {};
  if (!factors.from_zero) p = load_elements<N>(param, type, in_param);
#pragma unroll
  for (int i = 0; i < N; ++i) d.lane[i] = isfinite(d.lane[i]) ? d.lane[i] : 0;
  if (factors.decoupled_weight_decay != 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) p.lane[i] *= 1 - factors.lr * factors.decoupled_weight_decay;
  }
  if (momentum_buffer != nullptr) {
    Lanes<N> buffer = load_floats<N>(momentum_buffer, offset);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      buffer.lane[i] = saturated(fmaf(factors.momentum, buffer.lane[i], d.lane[i]), FLT_MAX);
      d.lane[i] =
          factors.nesterov ? fmaf(factors.momentum, buffer.lane[i], d.lane[i]) : buffer.lane[i];
    }
    store_floats<N>(momentum_buffer, offset, buffer);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    p.lane[i] = saturated(fmaf(-factors.lr, d.lane[i], p.lane[i]), largest_of(type));
  }
  store_elements<N>(param, type, in_param, p);
}

}  // namespace torchium::cuda_kernels
