#include "cuda_kernels/large_inverse_root.h"
#include "cuda_kernels/split_mma.cuh"
#include "cuda_kernels/symmetric_bands.cuh"

#include <utility>

namespace torchium::cuda_kernels {
namespace {

// From X to the root of M.
__device__ float unit_of_root(const NewtonRule& rule, const NewtonPlan& plan) {
  return plan.steps > 1 ? 1 / rule.first : 1.0f;
}

constexpr int kRowsAtOnce = 4;  // of a warp

// out = X in, kRowsAtOnce rows a warp; also the largest magnitude of each row if asked for.
// Vectors: [matrices, order]. A lane takes eight hi or eight lo at a time.
__global__ void __launch_bounds__(kThreads)
    apply_root_kernel(const __grid_constant__ NewtonRule rule,
                      const __grid_constant__ SplitMatrices X, const NewtonPlan* plans,
                      const float* in, float* out, float* largest) {
  const int groups = X.order / (kWarps * kRowsAtOnce);
  const int64_t matrix = blockIdx.x / groups;
  const int row = (blockIdx.x % groups * kWarps + threadIdx.x / 32) * kRowsAtOnce;
  const NewtonPlan plan = plans[matrix];
  if (plan.steps == NewtonPlan::kNotFinite) return;
  const int lane = threadIdx.x % 32;
  const bool is_hi = lane % 8 < 4;
  const float* v = in + matrix * X.order + lane % 4 * 8;
  const __half* A = X.matrix(matrix) + int64_t{2} * row * X.order + lane % 8 * 8;
  float sums[kRowsAtOnce] = {}, most[kRowsAtOnce] = {};
  for (int chunk = lane / 8; chunk < X.order / kSplitPadding; chunk += 4) {
    const float4 first = *reinterpret_cast<const float4*>(v + chunk * kSplitPadding);
    const float4 second = *reinterpret_cast<const float4*>(v + chunk * kSplitPadding + 4);
    const float2 factors[4] = {
        {first.x, first.y}, {first.z, first.w}, {second.x, second.y}, {second.z, second.w}};
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
      const uint4 halves =
          *reinterpret_cast<const uint4*>(A + 2 * (r * X.order + chunk * kSplitPadding));
      const uint32_t pairs[4] = {halves.x, halves.y, halves.z, halves.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
        sums[r] = fmaf(x.x, factors[i].x, fmaf(x.y, factors[i].y, sums[r]));
        most[r] = larger(most[r], larger(fabsf(x.x), fabsf(x.y)));
      }
    }
  }
  const float unit = unit_of_root(rule, plan);
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const float sum =
        combine_warp(is_hi ? sums[r] : sums[r] / kLowScale, [](float a, float b) { return a + b; });
    const float magnitude = combine_warp(is_hi ? most[r] : 0, larger);
    if (lane != 0) continue;
    out[matrix * X.order + row + r] = unit * sum;
    if (largest != nullptr) largest[matrix * X.order + row + r] = unit * magnitude;
  }
}

// Residual and verdict of every matrix: iterations are 0 for a root that is not accepted. images =
// S w for w = X^p D v.
__global__ void __launch_bounds__(kThreads)
    judge_kernel(const __grid_constant__ InverseRoot arguments, const NewtonPlan* plans,
                 const double* images, const float* targets, const float* last, int order,
                 const float* largest) {
  const int64_t matrix = blockIdx.x;
  const int n = arguments.rule.n;
  const NewtonPlan plan = plans[matrix];
  if (plan.steps == NewtonPlan::kNotFinite) {
    if (threadIdx.x == 0) {
      arguments.residual[matrix] = NAN;
      arguments.iterations[matrix] = 0;
      count_failure(arguments, matrix, /*accepted=*/false);
    }
    return;
  }
  __shared__ double sums[kWarps];
  __shared__ float maxima[kWarps];
  const double unit = double{plan.scale} * plan.inverse_top;
  double difference = 0;
  float most = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const int64_t j = matrix * order + i;
    const double error = images[j] * unit + double{plan.shift} * last[j] - targets[j];
    difference += error * error;
    most = larger(most, largest[j]);
  }
  difference = block_sum(difference, sums);
  most = block_largest(most, maxima);
  if (threadIdx.x == 0) {
    const auto residual = static_cast<float>(sqrt(difference) / plan.norm);
    const bool accepted = accepts(arguments, plan, residual, most);
    arguments.iterations[matrix] = accepted ? plan.steps + 1 : 0;
    arguments.residual[matrix] = accepted ? residual : 1.0f;
    count_failure(arguments, matrix, accepted);
  }
}

// Eight neighbours of a row, of which `count` are inside of the matrix.
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

// The root of A from that of M, eight neighbours a thread.
__global__ void __launch_bounds__(kThreads)
    write_root_kernel(const __grid_constant__ InverseRoot arguments,
                      const __grid_constant__ SplitMatrices X, const NewtonPlan* plans,
                      int64_t blocks_of_matrix) {
  const int n = arguments.rule.n;
  const auto [matrix, row, column] = piece_of_thread(X.order, blocks_of_matrix);
  if (row >= n || column >= n) return;
  const NewtonPlan plan = plans[matrix];
  const bool is_finite = plan.steps != NewtonPlan::kNotFinite;
  const bool accepted = is_finite && arguments.iterations[matrix] > 0;
  if (!accepted && arguments.failures != nullptr) return;
  float x[8];
  if (accepted) {
    load_eight(X.at(matrix, row, column), x);
    const float factor = plan.factor * unit_of_root(arguments.rule, plan);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = saturated(factor * x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = !is_finite ? NAN : row == column + i ? plan.factor : 0.0f;
  }
  write_row(arguments.root + (matrix * n + row) * n + column, n - column, x);
}

}  // namespace

cudaError_t finish_inverse_root(const InverseRoot& arguments, const LargeWorkspace& w,
                                const SplitMatrices& X, cudaStream_t stream) {
  const int n = arguments.rule.n;
  const int64_t matrices = arguments.matrices;
  const float* in = w.vectors;
  float* out = w.vectors + matrices * X.order;
  float* spare = out + matrices * X.order;
  const int64_t groups = X.order / (kWarps * kRowsAtOnce);
  for (int power = 0; power < arguments.rule.p; ++power) {
    apply_root_kernel<<<blocks(matrices * groups), kThreads, 0, stream>>>(
        arguments.rule, X, w.plans, in, out, power == 0 ? w.largest : nullptr);
    in = out;
    std::swap(out, spare);
  }
  band_kernel<false><<<blocks(matrices * bands_of(n)), kThreads, 0, stream>>>(
      arguments.A, n, in, X.order, w.images, nullptr);
  judge_kernel<<<blocks(matrices), kThreads, 0, stream>>>(arguments, w.plans, w.images, w.vectors,
                                                          in, X.order, w.largest);
  const int64_t blocks_of_matrix = blocks_of_pieces(X.order);
  write_root_kernel<<<blocks(matrices * blocks_of_matrix), kThreads, 0, stream>>>(
      arguments, X, w.plans, blocks_of_matrix);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
