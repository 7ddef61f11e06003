// Norms and inner products of the gradients of samples, summed over layers, from rows of vectors.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// A layer with one position per sample: the gradient of sample i with respect to its weight is the
// outer product of G[i] and A[i], and that with respect to its bias G[i]. Rows are contiguous.
struct SamplePair {
  const float* A = nullptr;          // [n, fan_in]; null: there is no weight
  const float* G = nullptr;          // [n, fan_out]
  int64_t A_pitch = 0, G_pitch = 0;  // elements between rows
  int fan_in = 0, fan_out = 0;
  double weight = 1, bias_weight = 0;
};

// The squared norms of gradients from those of their tiles: factor sum over k of tiles[i, k] /
// (scale_A[i] scale_G[i])^2.
struct TileSquares {
  const float* tiles = nullptr;  // [n, tiles_of_sample]
  const float *scale_A = nullptr, *scale_G = nullptr;
  int tiles_of_sample = 0;
  double factor = 1;
};

// One or the other; that which counts has a G, or tiles.
struct NormTerm {
  SamplePair pair;
  TileSquares squares;
};

// norms[i] <- sqrt(squares[i] + the sum over the terms of (weight |A_i|^2 + bias_weight) |G_i|^2),
// in float64, without the root for partial sums.
struct SampleNorms {
  static constexpr int kMostTerms = 32;

  NormTerm terms[kMostTerms];
  int count = 0;
  int64_t samples = 0;
  const double* squares = nullptr;  // [samples]; null: zero
  void* norms = nullptr;            // [samples]
  bool has_float_norms = false;     // not double
  bool has_root = true;
};

cudaError_t sample_norms(const SampleNorms& arguments, cudaStream_t stream);

// K_ij <- beta K_ij + the sum over the pairs of (weight A_i . A_j + bias_weight) G_i . G_j, in
// float64 and exactly symmetric. On tensor cores, for matrices of a few thousand rows at most.
struct PairGram {
  static constexpr int kMostPairs = 32;

  SamplePair pairs[kMostPairs];
  int count = 0;
  int samples = 0;
  double beta = 0;
  double* K = nullptr;  // [samples, samples]
};

// Whether a device of this compute capability has the kernel.
inline bool has_pair_gram(int major) { return major >= 8; }

cudaError_t pair_gram(const PairGram& arguments, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
