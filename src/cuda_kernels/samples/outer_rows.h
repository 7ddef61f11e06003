// The gradients of samples with respect to the weight of a layer with one position per sample.
#pragma once

#include "cuda_kernels/samples/sample_norms.h"

#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// rows[i] = weights[i] G[i] A[i]^T, of a pair with a weight.
struct OuterRows {
  SamplePair pair;
  int samples;
  const float* weights;  // [samples]; null: ones
  float* rows;           // [samples, fan_out, fan_in]
};

cudaError_t outer_rows(const OuterRows& arguments, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
