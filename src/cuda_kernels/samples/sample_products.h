// The gradients of samples with respect to a layer's weight on Hopper's tensor cores, in nearly
// float32 precision: G_i A_i^T for the vectors of sample i at all its positions. They are written,
// or only the squares of their elements are added up.
#pragma once

#include "cuda_kernels/split_gemm/split_fp16.h"

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// As split_positions() writes the operands: matrices [fan_out, pitch] and [fan_in, pitch] of all
// samples and groups, with scales of samples. Of the rows of G, only `outputs` from first_output on
// count.
struct SampleProduct {
  SplitFp16 A, G;
  int samples, groups, positions;
  int first_output, outputs;
};

// Whether this build and the device have the kernels.
bool has_sample_products(int major, int minor, int shared_bytes);

// Elements in parts are those of the gradients of sample i times scale_A[i] scale_G[i] / 2^e, at
// most 2^15. Returns 2^e.
double scale_of_positions(int positions);

// rows [samples, groups, outputs, fan_in] <- the gradients, times weights[i] for sample i unless
// null.
cudaError_t sample_rows(const SampleProduct& product, const float* weights, float* rows,
                        cudaStream_t stream);

// hi and lo [samples, groups, outputs, pitch] <- the gradients in parts, and zeros from fan_in on.
// pitch: fan_in, rounded up to a multiple of 8.
cudaError_t sample_parts(const SampleProduct& product, __half* hi, __half* lo, int pitch,
                         cudaStream_t stream);

// tiles [samples, squares_of_sample] <- numbers that add up to the squared norms of the gradients
// in parts.
int squares_of_sample(const SampleProduct& product);
cudaError_t sample_squares(const SampleProduct& product, float* tiles, cudaStream_t stream);

// K_ij += factor sum over k of J_ik J_jk / (scale_A[i] scale_G[i] scale_A[j] scale_G[j]), with K
// [samples, samples] symmetric. Sums over 256 terms are float32, sums of those in float32 too,
// those of parts in float64.
struct SampleGram {
  SplitFp16 J;  // rows: samples; columns: terms, a multiple of 8
  const float *scale_A, *scale_G;
  double factor;
  double* K;
  int parts = 0, part_terms = 0;  // from plan_sample_gram()
};

// Sets how the sum is cut; elements: floats in the workspace.
cudaError_t plan_sample_gram(SampleGram& gram, int64_t& elements);
cudaError_t sample_gram(const SampleGram& gram, float* workspace, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
