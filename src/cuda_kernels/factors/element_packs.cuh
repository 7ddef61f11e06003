// Several consecutive elements of a type that is known when the kernel is compiled, and sums over
// lanes of a warp.
#pragma once

#include "cuda_kernels/common/parameter_table.h"

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace torchium::cuda_kernels {

constexpr int kPack = 8;  // elements; aligned to as many

// N is kPack or 1.
template <typename Element, int N>
struct Pack {
  uint4 words[sizeof(Element) * N / sizeof(uint4)];

  __device__ void load(const Element* data) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(words) / sizeof(uint4)); ++i) {
      words[i] = __ldg(reinterpret_cast<const uint4*>(data) + i);
    }
  }
  __device__ float operator[](int i) const {
    return static_cast<float>(reinterpret_cast<const Element*>(words)[i]);
  }
};

template <typename Element>
struct Pack<Element, 1> {
  Element element;

  __device__ void load(const Element* data) { element = *data; }
  __device__ float operator[](int) const { return static_cast<float>(element); }
};

// data[i] <- value(i) for i < N; N is kPack, with data aligned to 16 bytes, or 1.
template <int N, typename Value>
__device__ void store_pack(float* data, const Value& value) {
  if constexpr (N == kPack) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      *reinterpret_cast<float4*>(data + i) =
          make_float4(value(i), value(i + 1), value(i + 2), value(i + 3));
    }
  } else {
    *data = value(0);
  }
}

// launch(X(), G()) with the types of the two tensors.
template <typename Launch>
void launch_for_type(ElementType type, const Launch& launch) {
  switch (type) {
    case ElementType::kBFloat16:
      return launch(__nv_bfloat16());
    case ElementType::kHalf:
      return launch(__half());
    default:
      return launch(float());
  }
}
template <typename Launch>
void launch_for_types(ElementType x, ElementType g, const Launch& launch) {
  launch_for_type(x,
                  [&](auto of_x) { launch_for_type(g, [&](auto of_g) { launch(of_x, of_g); }); });
}

// Whether packs of both tensors can be read at every multiple of kPack elements.
inline bool has_packs(const void* x, const void* g) {
  const auto is_aligned = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % sizeof(uint4) == 0;
  };
  return is_aligned(x) && is_aligned(g);
}

inline int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The least power of two that is not below n.
inline int next_power_of_two(int64_t n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// Adds a value of each thread over the lanes of a warp whose numbers differ by multiples of
// `first`, a power of two, and by less than `end`. All threads of the warp take part.
__device__ inline float sum_of_lanes(float value, int first, int end) {
  for (int offset = first; offset < end; offset *= 2) {
    value += __shfl_xor_sync(0xffffffff, value, offset);
  }
  return value;
}

}  // namespace torchium::cuda_kernels
