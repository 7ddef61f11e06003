// Warpgroup products of Hopper (sm_90a). Operands lie in shared memory in boxes of 64 rows of 64
// fp16 numbers, 128 bytes, whose 16-byte pieces are permuted: piece c of row r is at c ^ (r % 8).
// Boxes start at multiples of 1024 bytes.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

namespace torchium::cuda_kernels {

// Rows of the operand are in rows of boxes stacked vertically, or with is_transposed in columns of
// adjacent boxes; boxes are consecutive in memory.
template <bool is_transposed = false>
__device__ inline uint64_t tile_descriptor(uint32_t shared_address) {
  constexpr uint64_t kBetweenBoxes = is_transposed ? 64 * 128 / 16 : 1;
  constexpr uint64_t kBetweenEightRows = 1024 / 16;
  constexpr uint64_t kSwizzle128 = 1;
  return (shared_address & 0x3FFFF) / 16 | kBetweenBoxes << 16 | kBetweenEightRows << 32 |
         kSwizzle128 << 62;
}

// Orders registers of earlier products and shared memory before what follows.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `pending` groups are in flight.
template <int pending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// The accumulators in the text of a product, and as its first operands.
// clang-format off
#define TORCHIUM_REGISTERS_10(tens) \
  "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, " \
  "%" #tens "5, %" #tens "6, %" #tens "7, %" #tens "8, %" #tens "9, "
#define TORCHIUM_REGISTERS_60 \
  TORCHIUM_REGISTERS_10() TORCHIUM_REGISTERS_10(1) TORCHIUM_REGISTERS_10(2) \
  TORCHIUM_REGISTERS_10(3) TORCHIUM_REGISTERS_10(4) TORCHIUM_REGISTERS_10(5)
#define TORCHIUM_REGISTERS_64 TORCHIUM_REGISTERS_60 "%60, %61, %62, %63"
#define TORCHIUM_REGISTERS_128 \
  TORCHIUM_REGISTERS_60 \
  TORCHIUM_REGISTERS_10(6) TORCHIUM_REGISTERS_10(7) TORCHIUM_REGISTERS_10(8) \
  TORCHIUM_REGISTERS_10(9) TORCHIUM_REGISTERS_10(10) TORCHIUM_REGISTERS_10(11) \
  "%120, %121, %122, %123, %124, %125, %126, %127"
// clang-format on
#define TORCHIUM_OPERANDS_8(d, i)                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define TORCHIUM_OPERANDS_64(d, i)                                                          \
  TORCHIUM_OPERANDS_8(d, i), TORCHIUM_OPERANDS_8(d, i + 8), TORCHIUM_OPERANDS_8(d, i + 16), \
      TORCHIUM_OPERANDS_8(d, i + 24), TORCHIUM_OPERANDS_8(d, i + 32),                       \
      TORCHIUM_OPERANDS_8(d, i + 40), TORCHIUM_OPERANDS_8(d, i + 48),                       \
      TORCHIUM_OPERANDS_8(d, i + 56)
// The others are numbered after these.
#define TORCHIUM_WGMMA(type, columns, registers, a, b, add, across_a, across_b, ...)       \
  asm volatile(                                                                            \
      "{\n"                                                                                \
      ".reg .pred p;\n"                                                                    \
      "setp.ne.b32 p, %" #add                                                              \
      ", 0;\n"                                                                             \
      "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" registers \
      "}, "                                                                                \
      "%" #a ", %" #b ", p, 1, 1, %" #across_a ", %" #across_b                             \
      ";\n"                                                                                \
      "}\n"                                                                                \
      : __VA_ARGS__                                                                        \
      : "l"(A), "l"(B), "r"(accumulate), "n"(int{is_A_transposed}), "n"(int{is_B_transposed}))
#define TORCHIUM_WGMMA_128(type) \
  TORCHIUM_WGMMA(type, 128, TORCHIUM_REGISTERS_64, 64, 65, 66, 67, 68, TORCHIUM_OPERANDS_64(d, 0))
#define TORCHIUM_WGMMA_256(type)                                             \
  TORCHIUM_WGMMA(type, 256, TORCHIUM_REGISTERS_128, 128, 129, 130, 131, 132, \
                 TORCHIUM_OPERANDS_64(d, 0), TORCHIUM_OPERANDS_64(d, 64))

// d = A B^T, or d += A B^T with accumulate = 1. A: 64 x 16, B: 128 x 16, of Element: __half or
// __nv_bfloat16, each transposed in shared memory where its flag says so. Thread t of the four
// warps holds of rows 16 (t / 32) + t % 32 / 4 and that plus 8, for j < 16, the columns 8 j + t % 4
// * 2 and that plus 1: d[4 j], d[4 j + 1] and d[4 j + 2], d[4 j + 3].
template <bool is_A_transposed = false, bool is_B_transposed = false, typename Element = __half>
__device__ inline void wgmma_64x128x16(float (&d)[64], uint64_t A, uint64_t B, int accumulate) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    TORCHIUM_WGMMA_128("bf16");
  } else {
    TORCHIUM_WGMMA_128("f16");
  }
#endif
}

// The same with B: 256 x 16, and j < 32.
template <bool is_A_transposed, bool is_B_transposed, typename Element>
__device__ inline void wgmma_64x256x16(float (&d)[128], uint64_t A, uint64_t B, int accumulate) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    TORCHIUM_WGMMA_256("bf16");
  } else {
    TORCHIUM_WGMMA_256("f16");
  }
#endif
}

#undef TORCHIUM_WGMMA_256
#undef TORCHIUM_WGMMA_128
#undef TORCHIUM_WGMMA
#undef TORCHIUM_OPERANDS_64
#undef TORCHIUM_OPERANDS_8
#undef TORCHIUM_REGISTERS_128
#undef TORCHIUM_REGISTERS_64
#undef TORCHIUM_REGISTERS_60
#undef TORCHIUM_REGISTERS_10

}  // namespace torchium::cuda_kernels
