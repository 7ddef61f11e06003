#include "cuda_kernels/inverse_root/large_inverse_root.h"
#include "cuda_kernels/inverse_root/symmetric_bands.cuh"
#include "cuda_kernels/split_gemm/split_mma.cuh"

#include <utility>

namespace torchium::cuda_kernels {
namespace {

// From X to the root of M.
__device__ float unit_of_root(const NewtonRule& rule, const NewtonPlan& plan) {
  return plan.steps > 1 ? 1 / rule.first : 1.0f;
}

constexpr int kRowsAtOnce = 4;  // of a warp

// Sums over the warp of one number per row; every eighth lane returns the sum of row lane / 8. Each
// of the first two steps halves the number of values per lane.
__device__ float sum_of_rows(const float (&rows)[kRowsAtOnce]) {
  static_assert(kRowsAtOnce == 4);
  const int lane = threadIdx.x % 32;
  const bool upper = lane & 16, odd = lane & 8;
  float pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sent = upper ? rows[i] : rows[2 + i];
    pair[i] = (upper ? rows[2 + i] : rows[i]) + __shfl_xor_sync(0xffffffff, sent, 16);
  }
  const float sent = odd ? pair[0] : pair[1];
  float sum = (odd ? pair[1] : pair[0]) + __shfl_xor_sync(0xffffffff, sent, 8);
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
  return sum;
}

// out = X in for kRowsAtOnce rows, by one warp; optionally the largest magnitude of each row. A
// lane processes eight hi or eight lo parts at a time.
template <bool with_largest>
__device__ void apply_root(const SplitMatrices& X, int64_t matrix, int row, float unit,
                           const float* in, float* out, float* largest) {
  const int lane = threadIdx.x % 32;
  const bool is_hi = lane % 8 < 4;
  const float* v = in + lane % 4 * 8;
  const __half* A = X.matrix(matrix) + int64_t{2} * row * X.order + lane % 8 * 8;
  float sums[kRowsAtOnce] = {}, most[kRowsAtOnce] = {};
#pragma unroll 2
  for (int chunk = lane / 8; chunk < X.order / kSplitPadding; chunk += 4) {
    const float4 first = *reinterpret_cast<const float4*>(v + chunk * kSplitPadding);
    const float4 second = *reinterpret_cast<const float4*>(v + chunk * kSplitPadding + 4);
    const float2 factors[4] = {
        {first.x, first.y}, {first.z, first.w}, {second.x, second.y}, {second.z, second.w}};
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const uint4 eight =
          *reinterpret_cast<const uint4*>(A + 2 * (r * X.order + chunk * kSplitPadding));
      const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
        sums[r] = fmaf(x.x, factors[i].x, fmaf(x.y, factors[i].y, sums[r]));
        if (with_largest) most[r] = larger(most[r], larger(fabsf(x.x), fabsf(x.y)));
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    if (!is_hi) sums[r] /= kLowScale;
    if (!with_largest) continue;
    const float magnitude = combine_warp(is_hi ? most[r] : 0, larger);
    if (lane == 0) largest[row + r] = unit * magnitude;
  }
  const float sum = sum_of_rows(sums);
  if (lane % 8 == 0) out[row + lane / 8] = unit * sum;
}

// The same for all rows. Vectors: [matrices, order].
template <bool with_largest>
__global__ void __launch_bounds__(kThreads)
    apply_root_kernel(const __grid_constant__ NewtonRule rule,
                      const __grid_constant__ SplitMatrices X, const NewtonPlan* plans,
                      const float* in, float* out, float* largest) {
  const int groups = X.order / (kWarps * kRowsAtOnce);
  const int64_t matrix = blockIdx.x / groups;
  const int row = (blockIdx.x % groups * kWarps + threadIdx.x / 32) * kRowsAtOnce;
  const NewtonPlan plan = plans[matrix];
  if (plan.steps == NewtonPlan::kNotFinite) return;
  const int64_t first = matrix * X.order;
  apply_root<with_largest>(X, matrix, row, unit_of_root(rule, plan), in + first, out + first,
                           with_largest ? largest + first : nullptr);
}

// Vectors of one matrix to check its root: images = S w for w = X^p D v, the largest magnitude of
// each row of X, and D v.
struct Evidence {
  const double* images;
  const float *root_images, *largest, *targets;
};

// Residual of a root, and whether it is accepted: iterations are 0 if not. Called by all threads of
// a block.
template <int warps>
__device__ void accept(const InverseRoot& arguments, int64_t matrix, const NewtonPlan& plan,
                       const Evidence& evidence) {
  if (plan.steps == NewtonPlan::kNotFinite) {
    if (threadIdx.x == 0) {
      arguments.residual[matrix] = NAN;
      arguments.iterations[matrix] = 0;
      count_failure(arguments, matrix, /*accepted=*/false);
    }
    return;
  }
  __shared__ double sums[warps];
  __shared__ float maxima[warps];
  const double unit = double{plan.scale} * plan.inverse_top;
  double difference = 0;
  float most = 0;
  for (int i = threadIdx.x; i < arguments.rule.n; i += 32 * warps) {
    const double error = evidence.images[i] * unit + double{plan.shift} * evidence.root_images[i] -
                         evidence.targets[i];
    difference += error * error;
    most = larger(most, evidence.largest[i]);
  }
  difference = block_sum<warps>(difference, sums);
  most = block_largest<warps>(most, maxima);
  if (threadIdx.x == 0) {
    const auto residual = static_cast<float>(sqrt(difference) / plan.norm);
    const bool accepted = accepts(arguments, plan, residual, most);
    arguments.iterations[matrix] = accepted ? plan.steps + 1 : 0;
    arguments.residual[matrix] = accepted ? residual : 1.0f;
    count_failure(arguments, matrix, accepted);
  }
}

__global__ void __launch_bounds__(kThreads)
    accept_kernel(const __grid_constant__ InverseRoot arguments, const NewtonPlan* plans,
                  const double* images, const float* targets, const float* root_images, int order,
                  const float* largest) {
  const int64_t matrix = blockIdx.x, first = matrix * order;
  accept<kWarps>(arguments, matrix, plans[matrix],
                 {images + first, root_images + first, largest + first, targets + first});
}

// Eight consecutive elements of a row; the first `count` are inside the matrix.
__device__ void write_row(float* out, int count, const float (&x)[8]) {
  if (count >= 8 && reinterpret_cast<uintptr_t>(out) % sizeof(float4) == 0) {
    reinterpret_cast<float4*>(out)[0] = {x[0], x[1], x[2], x[3]};
    reinterpret_cast<float4*>(out)[1] = {x[4], x[5], x[6], x[7]};
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) out[i] = x[i];
  }
}

// The root of A from that of M: eight consecutive elements.
__device__ void write_root(const InverseRoot& arguments, const SplitMatrices& X,
                           const NewtonPlan& plan, bool accepted, const Piece& piece) {
  const int n = arguments.rule.n;
  const auto [matrix, row, column] = piece;
  if (row >= n || column >= n) return;
  float x[8];
  if (accepted) {
    load_eight(X.at(matrix, row, column), x);
    const float factor = plan.factor * unit_of_root(arguments.rule, plan);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = saturated(factor * x[i]);
  } else {
    const bool is_finite = plan.steps != NewtonPlan::kNotFinite;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = !is_finite ? NAN : row == column + i ? plan.factor : 0.0f;
  }
  write_row(arguments.root + (matrix * n + row) * n + column, n - column, x);
}

__global__ void __launch_bounds__(kThreads)
    write_root_kernel(const __grid_constant__ InverseRoot arguments,
                      const __grid_constant__ SplitMatrices X, const NewtonPlan* plans,
                      int64_t blocks_of_matrix) {
  const Piece piece = piece_of_thread(X.order, blocks_of_matrix);
  const bool accepted = arguments.iterations[piece.matrix] > 0;
  if (!is_written(arguments, piece.matrix, accepted)) return;
  write_root(arguments, X, plans[piece.matrix], accepted, piece);
}

constexpr int kMostInBlock = 256;  // order
constexpr int kBlockThreads = 1024, kBlockWarps = kBlockThreads / 32;

// image = S w by one block, n at most kMostInBlock: A is read once, for both its rows and its
// columns.
__device__ void apply_symmetric_part(const float* A, int n, const float* w, double* image) {
  constexpr int kParts = 4, kColumns = kMostInBlock / 32;  // of a lane
  __shared__ double parts[kParts][kMostInBlock];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  double columns[kColumns] = {};
#pragma unroll 2
  for (int row = warp; row < n; row += kBlockWarps) {
    double sum = 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = lane + 32 * i;
      const double x = column < n ? A[row * n + column] : 0;
      sum += column < n ? x * w[column] : 0;
      columns[i] += x * w[row];
    }
    sum = warp_sum(sum);
    if (lane == 0) image[row] = sum;
  }
  for (int turn = 0; turn < kBlockWarps / kParts; ++turn) {  // in order: sums are reproducible
    if (warp / kParts == turn) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        double& part = parts[warp % kParts][lane + 32 * i];
        part = turn == 0 ? columns[i] : part + columns[i];
      }
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < n; i += kBlockThreads) {
    image[i] = (image[i] + parts[0][i] + parts[1][i] + parts[2][i] + parts[3][i]) / 2;
  }
  __syncthreads();
}

// All of the above in one launch, one block per matrix. Few matrices are processed at a time, so
// they remain in the L2 cache: X and A are read from memory once.
__global__ void __launch_bounds__(kBlockThreads, 1)
    result_kernel(const __grid_constant__ InverseRoot arguments,
                  const __grid_constant__ SplitMatrices X, const NewtonPlan* plans,
                  const float* targets) {
  __shared__ __align__(16) float vectors[3][kMostInBlock];
  static_assert(__alignof__(vectors) % alignof(float4) == 0);  // read four at a time
  __shared__ float largest[kMostInBlock];
  __shared__ double images[kMostInBlock];
  const int64_t matrix = blockIdx.x;
  const NewtonRule& rule = arguments.rule;
  const NewtonPlan plan = plans[matrix];
  const float* in = vectors[0];
  if (plan.steps != NewtonPlan::kNotFinite) {
    const int i = threadIdx.x;
    if (i < X.order) vectors[0][i] = targets[matrix * X.order + i];
    __syncthreads();
    for (int power = 0; power < rule.p; ++power) {
      float* out = vectors[1 + power % 2];
      const float unit = unit_of_root(rule, plan);
      for (int row = threadIdx.x / 32 * kRowsAtOnce; row < X.order;
           row += kBlockWarps * kRowsAtOnce) {
        if (power == 0) {
          apply_root<true>(X, matrix, row, unit, in, out, largest);
        } else {
          apply_root<false>(X, matrix, row, unit, in, out, nullptr);
        }
      }
      __syncthreads();
      in = out;
    }
    apply_symmetric_part(arguments.A + matrix * rule.n * rule.n, rule.n, in, images);
  }
  accept<kBlockWarps>(arguments, matrix, plan, {images, in, largest, vectors[0]});
  __syncthreads();
  const bool accepted = arguments.iterations[matrix] > 0;
  if (!is_written(arguments, matrix, accepted)) return;
  const int pieces_of_row = X.order / 8;
  for (int i = threadIdx.x; i < X.order * pieces_of_row; i += kBlockThreads) {
    write_root(arguments, X, plan, accepted, {matrix, i / pieces_of_row, i % pieces_of_row * 8});
  }
}

}  // namespace

cudaError_t finish_inverse_root(const InverseRoot& arguments, const LargeWorkspace& w,
                                const SplitMatrices& X, cudaStream_t stream) {
  const int n = arguments.rule.n;
  const int64_t matrices = arguments.matrices;
  if (X.order <= kMostInBlock) {
    result_kernel<<<blocks(matrices), kBlockThreads, 0, stream>>>(arguments, X, w.plans, w.vectors);
    return cudaGetLastError();
  }
  const float* in = w.vectors;
  float* out = w.vectors + matrices * X.order;
  float* spare = out + matrices * X.order;
  const int64_t groups = X.order / (kWarps * kRowsAtOnce);
  for (int power = 0; power < arguments.rule.p; ++power) {
    const auto apply = power == 0 ? apply_root_kernel<true> : apply_root_kernel<false>;
    apply<<<blocks(matrices * groups), kThreads, 0, stream>>>(arguments.rule, X, w.plans, in, out,
                                                              w.largest);
    in = out;
    std::swap(out, spare);
  }
  band_kernel<false><<<blocks(matrices * bands_of(n)), kThreads, 0, stream>>>(
      arguments.A, n, in, X.order, w.images, nullptr);
  accept_kernel<<<blocks(matrices), kThreads, 0, stream>>>(arguments, w.plans, w.images, w.vectors,
                                                           in, X.order, w.largest);
  const int64_t blocks_of_matrix = blocks_of_pieces(X.order);
  write_root_kernel<<<blocks(matrices * blocks_of_matrix), kThreads, 0, stream>>>(
      arguments, X, w.plans, blocks_of_matrix);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
