#include "cuda_kernels/samples/narrow_rows.h"

namespace torchium::cuda_kernels {
namespace {

// A block computes 64 outputs of a sample by up to 31 inputs, and the sums over the positions as
// the product with an input of ones. Each warp takes a slice of the positions of a stage and half
// of the inputs, each of its lanes 8 outputs and 4 inputs.
constexpr int kOutputs = 64;
constexpr int kInputs = 32;
constexpr int kPositions = 64;  // of a stage
constexpr int kThreads = 256;
constexpr int kSlices = kThreads / 32 / 2;
constexpr int kPitch = kPositions + 4;
constexpr int kQuads = kPositions / 4;
constexpr int kGradientLoads = kOutputs * kQuads / kThreads;  // of four elements, per thread
constexpr int kInputLoads = kInputs * kPositions / kThreads;  // of one element
constexpr int kInputStep = kThreads / kPositions;             // between the inputs of a thread
constexpr int kTile = kOutputs * kInputs;
static_assert(NarrowRows::kMostInputs == kInputs - 1);

union Shared {
  struct {
    float G[kOutputs][kPitch];
    float A[kInputs][kPitch];
  } stage;
  float partial[kSlices / 2][kTile];
};

// Where an input of the matrix lies in the images, from the first pixel of a patch.
struct Element {
  Element() = default;
  __device__ Element(const NarrowRows& p, int input) {
    const int patch = p.kernel[0] * p.kernel[1];
    channel = input / patch;
    const int row = (input - channel * patch) / p.kernel[1];
    below = row * p.dilation[0];
    right = (input - channel * patch - row * p.kernel[1]) * p.dilation[1];
    is_one = input == p.channels * patch;
  }

  int channel, below, right;
  bool is_one;
};

// What a thread loads of a stage, in registers until the stage before has been used.
class StageLoads {
 public:
  __device__ StageLoads(const NarrowRows& p, const Element* elements, int sample, int first_output)
      : p_(p),
        elements_(elements),
        positions_(p.output_size[0] * p.output_size[1]),
        is_aligned_(positions_ % 4 == 0 && reinterpret_cast<uintptr_t>(p.gradient) % 16 == 0),
        gradient_(p.gradient + (int64_t{sample} * p.fan_out + first_output) * positions_),
        outputs_(p.fan_out - first_output),
        image_(p.input + sample * p.strides[0]) {}

  __device__ void load(int begin) {
#pragma unroll
    for (int i = 0; i < kGradientLoads; ++i) {
      const int output = thread() / kQuads + i * (kThreads / kQuads);
      G_[i] = gradient_at(output, begin + 4 * (thread() % kQuads));
    }
    const int position = begin + thread() % kPositions;
    const int row = position / p_.output_size[1];
    const int y = row * p_.stride[0] - p_.padding[0];
    const int x = (position - row * p_.output_size[1]) * p_.stride[1] - p_.padding[1];
#pragma unroll
    for (int i = 0; i < kInputLoads; ++i) {
      A_[i] = position < positions_ ? input_at(elements_[first_input() + i * kInputStep], y, x) : 0;
    }
  }

  __device__ void store(Shared& shared) const {
#pragma unroll
    for (int i = 0; i < kGradientLoads; ++i) {
      const int output = thread() / kQuads + i * (kThreads / kQuads);
      *reinterpret_cast<float4*>(&shared.stage.G[output][4 * (thread() % kQuads)]) = G_[i];
    }
#pragma unroll
    for (int i = 0; i < kInputLoads; ++i) {
      shared.stage.A[first_input() + i * kInputStep][thread() % kPositions] = A_[i];
    }
  }

  __device__ int positions() const { return positions_; }

 private:
  static __device__ int thread() { return static_cast<int>(threadIdx.x); }
  static __device__ int first_input() { return thread() / kPositions; }

  __device__ float4 gradient_at(int output, int position) const {
    if (output >= outputs_) return {};
    const float* G = gradient_ + int64_t{output} * positions_ + position;
    if (is_aligned_) {
      return position < positions_ ? *reinterpret_cast<const float4*>(G) : float4{};
    }
    const auto each = [&](int i) { return position + i < positions_ ? G[i] : 0.0f; };
    return {each(0), each(1), each(2), each(3)};
  }

  // Behind the inputs of the layer stands one of ones.
  __device__ float input_at(const Element& element, int y, int x) const {
    if (element.channel >= p_.channels) return element.is_one ? 1.0f : 0.0f;
    const int row = y + element.below, column = x + element.right;
    const bool is_inside = static_cast<unsigned>(row) < static_cast<unsigned>(p_.size[0]) &&
                           static_cast<unsigned>(column) < static_cast<unsigned>(p_.size[1]);
    return is_inside ? image_[element.channel * p_.strides[1] + row * p_.strides[2] +
                              column * p_.strides[3]]
                     : 0.0f;
  }

  const NarrowRows& p_;
  const Element* elements_;
  int positions_;
  bool is_aligned_;
  const float* gradient_;
  int outputs_;
  const float* image_;
  float4 G_[kGradientLoads];
  float A_[kInputLoads];
};

using Sums = float[8][4];

// The output and the input of element [i][j] of this lane's sums.
__device__ int output_of(int i) { return 8 * i + static_cast<int>(threadIdx.x) % 32 / 4; }
__device__ int input_of(int j) {
  const int thread = static_cast<int>(threadIdx.x);
  return thread / 32 % 2 * (kInputs / 2) + 4 * j + thread % 4;
}

// Adds the products at four positions.
__device__ void multiply(const Shared& shared, int position, Sums& sums) {
  float4 A[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    A[j] = *reinterpret_cast<const float4*>(&shared.stage.A[input_of(j)][position]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 G = *reinterpret_cast<const float4*>(&shared.stage.G[output_of(i)][position]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sums[i][j] = fmaf(G.x, A[j].x, sums[i][j]);
      sums[i][j] = fmaf(G.y, A[j].y, sums[i][j]);
      sums[i][j] = fmaf(G.z, A[j].z, sums[i][j]);
      sums[i][j] = fmaf(G.w, A[j].w, sums[i][j]);
    }
  }
}

// The sum over the slices, in partial[0].
__device__ void add_up(Shared& shared, Sums& sums) {
  const int slice = static_cast<int>(threadIdx.x) / 64;
  const auto for_each = [&](float* tile, const auto& visit) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) visit(sums[i][j], tile[output_of(i) * kInputs + input_of(j)]);
    }
  };
  const auto store = [](float mine, float& place) { place = mine; };
  const auto add = [](float& mine, float place) { mine += place; };
  for (int half = kSlices / 2; half > 0; half /= 2) {
    __syncthreads();
    if (slice >= half && slice < 2 * half) for_each(shared.partial[slice - half], store);
    __syncthreads();
    if (slice < half) for_each(shared.partial[slice], add);
  }
  __syncthreads();
  if (slice == 0) for_each(shared.partial[0], store);
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads, 2)
    narrow_rows_kernel(const __grid_constant__ NarrowRows arguments, int tiles) {
  __shared__ Shared shared;
  __shared__ Element elements[kInputs];
  const int thread = static_cast<int>(threadIdx.x);
  const int sample = static_cast<int>(blockIdx.x) / tiles;
  const int first_output = (static_cast<int>(blockIdx.x) - sample * tiles) * kOutputs;
  if (thread < kInputs) elements[thread] = Element(arguments, thread);
  __syncthreads();
  StageLoads loads(arguments, elements, sample, first_output);
  const int first_of_slice = thread / 64 * (kPositions / kSlices);
  Sums sums = {};
  loads.load(0);
  for (int begin = 0; begin < loads.positions(); begin += kPositions) {
    __syncthreads();  // nobody reads the stage before
    loads.store(shared);
    __syncthreads();
    loads.load(begin + kPositions);  // in flight during the products
#pragma unroll
    for (int position = 0; position < kPositions / kSlices; position += 4) {
      multiply(shared, first_of_slice + position, sums);
    }
  }
  add_up(shared, sums);
  const int inputs = arguments.channels * arguments.kernel[0] * arguments.kernel[1];
  for (int e = thread; e < kTile; e += kThreads) {
    const int output = first_output + e / kInputs, input = e % kInputs;
    if (output >= arguments.fan_out || input > inputs) continue;
    const int64_t row = int64_t{sample} * arguments.fan_out + output;
    if (input < inputs) {
      arguments.rows[row * inputs + input] = shared.partial[0][e];
    } else {
      arguments.sums[row] = shared.partial[0][e];
    }
  }
}

}  // namespace

cudaError_t narrow_rows(const NarrowRows& arguments, cudaStream_t stream) {
  if (arguments.samples == 0) return cudaSuccess;
  const int tiles = (arguments.fan_out + kOutputs - 1) / kOutputs;
  narrow_rows_kernel<<<arguments.samples * tiles, kThreads, 0, stream>>>(arguments, tiles);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
