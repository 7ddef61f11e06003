// Floats as one or two halves with a common scale, for the tensor cores: x s = hi + lo / 2048, s a
// power of two that brings the largest magnitude below 2^15. hi alone has 11 bits, both have 22,
// down to 2^-29 of the largest (Ootomo and Yokota 2022, arXiv 2203.03341).
#pragma once

#include "cuda_kernels/parameter_table.h"

#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

constexpr float kLowHalfScale = 2048.0f;

// largest <- the largest magnitude of x, as the bits of a float, which order as floats do.
cudaError_t find_largest(const float* x, int64_t elements, unsigned* largest, cudaStream_t stream);

// The same of the diagonals of [matrices, n, n] of any type.
cudaError_t find_largest_on_diagonals(const void* x, ElementType type, int64_t matrices, int64_t n,
                                      unsigned* largest, cudaStream_t stream);

// hi, lo and *scale of [elements] none of which is above twice *largest; lo may be null.
cudaError_t split_halves(const void* x, ElementType type, int64_t elements, const unsigned* largest,
                         __half* hi, __half* lo, float* scale, cudaStream_t stream);

// What a product of operands with these two scales is multiplied by, for C <- alpha A B + beta C:
// alpha of hi hi, alpha of hi lo and lo hi, beta = 0, and 1.
cudaError_t undo_scales(const float* first, const float* second, float* coefficients,
                        cudaStream_t stream);

}  // namespace torchium::cuda_kernels
