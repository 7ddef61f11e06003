#include "cuda_kernels/common/warp_sums.cuh"
#include "cuda_kernels/samples/sample_norms.h"

namespace torchium::cuda_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// The sum over a warp of x[i] or its square, in every lane.
template <bool squared>
__device__ double sum_of_row(const float* x, int size, int lane) {
  double sum = 0;
#pragma unroll 8
  for (int i = lane; i < size; i += 32) {
    const double element = x[i];
    sum += squared ? element * element : element;
  }
  return warp_sum(sum);
}

__device__ double squared_norm(const NormTerm& term, int64_t sample, int lane) {
  const SamplePair& pair = term.pair;
  if (pair.G != nullptr) {
    double factor = pair.bias_weight;
    if (pair.A != nullptr) {
      factor += pair.weight * sum_of_row<true>(pair.A + sample * pair.A_pitch, pair.fan_in, lane);
    }
    return factor * sum_of_row<true>(pair.G + sample * pair.G_pitch, pair.fan_out, lane);
  }
  const TileSquares& squares = term.squares;
  const double scale = static_cast<double>(squares.scale_A[sample]) * squares.scale_G[sample];
  const double sum = sum_of_row<false>(squares.tiles + sample * squares.tiles_of_sample,
                                       squares.tiles_of_sample, lane);
  return squares.factor * sum / (scale * scale);
}

// A block computes one sample's norm, each of its warps some of the terms.
__global__ void __launch_bounds__(kThreads)
    sample_norms_kernel(const __grid_constant__ SampleNorms arguments) {
  __shared__ double sums[kWarps];
  const int64_t sample = blockIdx.x;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  double sum = 0;
  for (int i = warp; i < arguments.count; i += kWarps) {
    sum += squared_norm(arguments.terms[i], sample, lane);
  }
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  double total = arguments.squares == nullptr ? 0.0 : arguments.squares[sample];
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += sums[i];
  if (arguments.has_root) total = sqrt(total);
  if (arguments.has_float_norms) {
    static_cast<float*>(arguments.norms)[sample] = static_cast<float>(total);
  } else {
    static_cast<double*>(arguments.norms)[sample] = total;
  }
}

}  // namespace

cudaError_t sample_norms(const SampleNorms& arguments, cudaStream_t stream) {
  if (arguments.samples == 0) return cudaSuccess;
  sample_norms_kernel<<<static_cast<unsigned>(arguments.samples), kThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
