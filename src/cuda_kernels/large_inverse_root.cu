#include "cuda_kernels/large_inverse_root.h"
#include "cuda_kernels/newton_plan.cuh"
#include "cuda_kernels/split_mma.cuh"

#include <utility>

namespace torchium::cuda_kernels {
namespace {

constexpr int kBand = 32;  // rows and columns of a tile
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRowsPerWarp = kBand / kWarps;

__host__ __device__ int bands_of(int n) { return (n + kBand - 1) / kBand; }

__device__ float larger(float a, float b) { return a > b || a != a ? a : b; }  // NaN wins

template <typename T, typename Combine>
__device__ T combine_warp(T x, const Combine& combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = combine(x, __shfl_xor_sync(0xffffffff, x, offset));
  }
  return x;
}

__device__ double warp_sum(double x) {
  return combine_warp(x, [](double a, double b) { return a + b; });
}

// The same in all threads of the block.
__device__ double block_sum(double x, double* scratch) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (int warp = 0; warp < kWarps; ++warp) sum += scratch[warp];
  return sum;
}

__device__ float block_largest(float x, float* scratch) {
  x = combine_warp(x, larger);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  float largest = 0;
  for (int warp = 0; warp < kWarps; ++warp) largest = larger(largest, scratch[warp]);
  return largest;
}

// A tile of a matrix and the transposed of its mirror image, zero outside of n x n.
class SymmetricTile {
 public:
  __device__ void load(const float* A, int n, int row, int column) {
    const int lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < kBand; r += kWarps) {
      direct_[r][lane] =
          row + r < n && column + lane < n ? A[int64_t{row + r} * n + column + lane] : 0;
      mirror_[r][lane] =
          column + r < n && row + lane < n ? A[int64_t{column + r} * n + row + lane] : 0;
    }
  }
  // Of the symmetric part. Halves are added, because a sum may overflow.
  __device__ float at(int r, int c) const { return 0.5f * direct_[r][c] + 0.5f * mirror_[c][r]; }

 private:
  float direct_[kBand][kBand + 1], mirror_[kBand][kBand + 1];
};

// images[i] = sum_j S_ij v_j for one band of rows, v random signs or `vectors`. With random signs
// also the largest magnitude, row sum of magnitudes and sum of squares of the band. Doubles,
// because nothing is scaled yet.
template <bool by_signs>
__global__ void __launch_bounds__(kThreads)
    band_kernel(const float* A, int n, const float* vectors, double* images, double* partials) {
  const int bands = bands_of(n);
  const int64_t matrix = blockIdx.x / bands;
  const int row = blockIdx.x % bands * kBand;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __shared__ SymmetricTile tile;
  double image[kRowsPerWarp] = {}, magnitudes[kRowsPerWarp] = {}, square = 0;
  float largest = 0;
  for (int column = 0; column < n; column += kBand) {
    __syncthreads();
    tile.load(A + matrix * n * n, n, row, column);
    __syncthreads();
    const int j = column + lane;
    const float v = j >= n ? 0 : by_signs ? probe_sign(j) : vectors[matrix * n + j];
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const double x = tile.at(warp * kRowsPerWarp + i, lane);
      image[i] += x * v;
      if (by_signs) {
        magnitudes[i] += fabs(x);
        square += x * x;
        largest = larger(largest, fabsf(static_cast<float>(x)));
      }
    }
  }
  double most = 0;
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const double sum = warp_sum(image[i]);
    const int r = row + warp * kRowsPerWarp + i;
    if (lane == 0 && r < n) images[matrix * n + r] = sum;
    if (by_signs) most = fmax(most, warp_sum(magnitudes[i]));
  }
  if (!by_signs) return;
  __shared__ double sums[kWarps];
  __shared__ float maxima[kWarps];
  square = block_sum(square, sums);
  largest = block_largest(largest, maxima);
  __syncthreads();
  if (lane == 0) sums[warp] = most;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 0; w < kWarps; ++w) most = fmax(most, sums[w]);
    double* partial = partials + 3 * blockIdx.x;
    partial[0] = largest;
    partial[1] = most;
    partial[2] = square;
  }
}

struct PlanOutputs {
  NewtonPlan* plans;
  int* steps;
  float* coefficients;
  float* targets;
};

// One block a matrix: its plan, the coefficients of its steps and target = D v in units of top.
__global__ void __launch_bounds__(kThreads)
    plan_kernel(const __grid_constant__ InverseRoot arguments,
                const __grid_constant__ SmallLadder ladder, const double* images,
                const double* partials, PlanOutputs out) {
  const int64_t matrix = blockIdx.x;
  const int n = arguments.rule.n;
  __shared__ NewtonPlan plan;
  if (threadIdx.x == 0) {
    const int bands = bands_of(n);
    float largest = 0;
    double most = 0, square = 0;
    for (int band = 0; band < bands; ++band) {
      const double* partial = partials + 3 * (matrix * bands + band);
      largest = larger(largest, static_cast<float>(partial[0]));
      most = fmax(most, partial[1]);
      square += partial[2];
    }
    const double scale = newton_scale(largest, arguments.rule.eps);
    plan = plan_newton(arguments.rule, ladder, largest <= FLT_MAX, scale, scale * most,
                       scale * sqrt(square), arguments.damping + matrix, arguments.floor + matrix);
    out.plans[matrix] = plan;
    out.steps[matrix] = plan.steps;
  }
  __syncthreads();
  const int first = (plan.rung - ladder.lowest_rung) * ladder.steps;
  for (int e = threadIdx.x; e < 3 * ladder.steps; e += kThreads) {
    out.coefficients[(e / 3 * arguments.matrices + matrix) * 3 + e % 3] =
        static_cast<float>(ladder.coefficients[3 * first + e]);
  }
  const double unit = double{plan.scale} * plan.inverse_top;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    out.targets[matrix * n + i] =
        static_cast<float>(images[matrix * n + i] * unit + plan.shift * probe_sign(i));
  }
}

// M = (scale S + damping I) / top, one tile a block.
__global__ void __launch_bounds__(kThreads)
    fill_kernel(const float* A, int n, const NewtonPlan* plans, SplitMatrices M) {
  const int bands = M.order / kBand;
  const int64_t matrix = blockIdx.x / (bands * bands);
  const int row = blockIdx.x % (bands * bands) / bands * kBand;
  const int column = blockIdx.x % bands * kBand;
  const NewtonPlan plan = plans[matrix];
  if (plan.steps == NewtonPlan::kNotFinite) return;
  __shared__ SymmetricTile tile;
  tile.load(A + matrix * n * n, n, row, column);
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < kBand; r += kWarps) {
    float x = tile.at(r, lane) * plan.scale * plan.inverse_top;
    if (row + r == column + lane && row + r < n) x += plan.shift;
    const int64_t offset = int64_t{row + r} * M.order + column + lane;
    split(x, M.hi(matrix)[offset], M.lo(matrix)[offset]);
  }
}

// The root of M of one matrix.
struct RootOfM {
  const __half* hi;
  const __half* lo;
  float unit;
  __device__ RootOfM(const RootOfSteps& roots, const NewtonRule& rule, int steps, int64_t matrix)
      : hi(roots.X[steps - 1].hi(matrix)),
        lo(roots.X[steps - 1].lo(matrix)),
        unit(steps > 1 ? 1 / rule.first : 1.0f) {}
  __device__ float at(int64_t offset) const { return unit * join(hi[offset], lo[offset]); }
};

// out = X in, one row a warp; also the largest magnitude of the row if asked for.
__global__ void __launch_bounds__(kThreads)
    apply_root_kernel(const __grid_constant__ NewtonRule rule,
                      const __grid_constant__ RootOfSteps roots, const int* steps, const float* in,
                      float* out, float* largest) {
  const int rows = (rule.n + kWarps - 1) / kWarps;  // blocks of them
  const int64_t matrix = blockIdx.x / rows;
  const int row = blockIdx.x % rows * kWarps + threadIdx.x / 32;
  if (row >= rule.n || steps[matrix] == NewtonPlan::kNotFinite) return;
  const RootOfM X(roots, rule, steps[matrix], matrix);
  const int lane = threadIdx.x % 32;
  const int64_t start = int64_t{row} * roots.X[0].order;
  float sum = 0, most = 0;
  for (int j = 2 * lane; j < rule.n; j += 64) {
    const __half2 hi = *reinterpret_cast<const __half2*>(X.hi + start + j);
    const __half2 lo = *reinterpret_cast<const __half2*>(X.lo + start + j);
    const float x = X.unit * join(hi.x, lo.x);
    sum = fmaf(x, in[matrix * rule.n + j], sum);
    most = larger(most, fabsf(x));
    if (j + 1 < rule.n) {
      const float y = X.unit * join(hi.y, lo.y);
      sum = fmaf(y, in[matrix * rule.n + j + 1], sum);
      most = larger(most, fabsf(y));
    }
  }
  sum = combine_warp(sum, [](float a, float b) { return a + b; });
  most = combine_warp(most, larger);
  if (lane == 0) {
    out[matrix * rule.n + row] = sum;
    if (largest != nullptr) largest[matrix * rule.n + row] = most;
  }
}

// Residual and verdict of every matrix: iterations are 0 for a root that is not accepted. images =
// S w for w = X^p D v.
__global__ void __launch_bounds__(kThreads)
    judge_kernel(const __grid_constant__ InverseRoot arguments, const NewtonPlan* plans,
                 const double* images, const float* targets, const float* last,
                 const float* largest) {
  const int64_t matrix = blockIdx.x;
  const int n = arguments.rule.n;
  const NewtonPlan plan = plans[matrix];
  if (plan.steps == NewtonPlan::kNotFinite) {
    if (threadIdx.x == 0) {
      arguments.residual[matrix] = NAN;
      arguments.iterations[matrix] = 0;
    }
    return;
  }
  __shared__ double sums[kWarps];
  __shared__ float maxima[kWarps];
  const double unit = double{plan.scale} * plan.inverse_top;
  double difference = 0;
  float most = 0;
  for (int64_t i = matrix * n + threadIdx.x; i < (matrix + 1) * n; i += kThreads) {
    const double error = images[i] * unit + double{plan.shift} * last[i] - targets[i];
    difference += error * error;
    most = larger(most, largest[i]);
  }
  difference = block_sum(difference, sums);
  most = block_largest(most, maxima);
  if (threadIdx.x == 0) {
    const auto residual = static_cast<float>(sqrt(difference) / plan.norm);
    const bool accepted = residual <= arguments.rule.residual_tolerance && most <= plan.limit;
    arguments.iterations[matrix] = accepted ? plan.steps : 0;
    arguments.residual[matrix] = accepted ? residual : 1.0f;
  }
}

// The root of A from that of M.
__global__ void __launch_bounds__(kThreads)
    write_root_kernel(const __grid_constant__ InverseRoot arguments,
                      const __grid_constant__ RootOfSteps roots, const NewtonPlan* plans) {
  const int n = arguments.rule.n;
  const int64_t matrix = blockIdx.x / n;
  const int row = blockIdx.x % n;
  const NewtonPlan plan = plans[matrix];
  float* out = arguments.root + (matrix * n + row) * n;
  if (plan.steps == NewtonPlan::kNotFinite || arguments.iterations[matrix] == 0) {
    for (int j = threadIdx.x; j < n; j += kThreads) {
      out[j] = plan.steps == NewtonPlan::kNotFinite ? NAN : row == j ? plan.factor : 0.0f;
    }
    return;
  }
  const RootOfM X(roots, arguments.rule, plan.steps, matrix);
  const int64_t start = int64_t{row} * roots.X[0].order;
  for (int j = threadIdx.x; j < n; j += kThreads) out[j] = saturated(plan.factor * X.at(start + j));
}

// Hands out pieces of one allocation.
class Pieces {
 public:
  explicit Pieces(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <typename T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * sizeof(T) + 255) / 256 * 256;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

unsigned blocks(int64_t count) { return static_cast<unsigned>(count); }

}  // namespace

LargeWorkspace::LargeWorkspace(void* memory, int64_t matrices, int n) : matrices_(matrices) {
  Pieces pieces(memory);
  plans_ = pieces.take<NewtonPlan>(matrices);
  images_ = pieces.take<double>(matrices * n);
  partials_ = pieces.take<double>(3 * matrices * bands_of(n));
  vectors_ = pieces.take<float>(3 * matrices * n);
  coefficients_ = pieces.take<float>(3 * matrices * kMostSteps);
  largest_ = pieces.take<float>(matrices * n);
  steps_ = pieces.take<int>(matrices);
}

size_t LargeWorkspace::bytes(int64_t matrices, int n) {
  Pieces pieces(nullptr);
  pieces.take<NewtonPlan>(matrices);
  pieces.take<double>(matrices * n);
  pieces.take<double>(3 * matrices * bands_of(n));
  pieces.take<float>(3 * matrices * n);
  pieces.take<float>(3 * matrices * kMostSteps);
  pieces.take<float>(matrices * n);
  pieces.take<int>(matrices);
  return pieces.used();
}

// What may look into the workspace.
struct LargeKernels {
  static void begin(const InverseRoot& arguments, const SmallLadder& ladder,
                    const LargeWorkspace& w, const SplitMatrices& M, cudaStream_t stream) {
    const int n = arguments.rule.n;
    const int64_t matrices = arguments.matrices;
    band_kernel<true><<<blocks(matrices * bands_of(n)), kThreads, 0, stream>>>(
        arguments.A, n, nullptr, w.images_, w.partials_);
    plan_kernel<<<blocks(matrices), kThreads, 0, stream>>>(
        arguments, ladder, w.images_, w.partials_,
        {w.plans_, w.steps_, w.coefficients_, w.vectors_});
    const int64_t tiles = int64_t{M.order / kBand} * (M.order / kBand);
    fill_kernel<<<blocks(matrices * tiles), kThreads, 0, stream>>>(arguments.A, n, w.plans_, M);
  }

  static void finish(const InverseRoot& arguments, const LargeWorkspace& w,
                     const RootOfSteps& roots, cudaStream_t stream) {
    const int n = arguments.rule.n;
    const int64_t matrices = arguments.matrices;
    const float* in = w.vectors_;
    float* out = w.vectors_ + matrices * n;
    float* spare = out + matrices * n;
    const int64_t rows = (n + kWarps - 1) / kWarps;
    for (int power = 0; power < arguments.rule.p; ++power) {
      apply_root_kernel<<<blocks(matrices * rows), kThreads, 0, stream>>>(
          arguments.rule, roots, w.steps_, in, out, power == 0 ? w.largest_ : nullptr);
      in = out;
      std::swap(out, spare);
    }
    band_kernel<false><<<blocks(matrices * bands_of(n)), kThreads, 0, stream>>>(arguments.A, n, in,
                                                                                w.images_, nullptr);
    judge_kernel<<<blocks(matrices), kThreads, 0, stream>>>(arguments, w.plans_, w.images_,
                                                            w.vectors_, in, w.largest_);
    write_root_kernel<<<blocks(matrices * n), kThreads, 0, stream>>>(arguments, roots, w.plans_);
  }
};

cudaError_t begin_inverse_root(const InverseRoot& arguments, const SmallLadder& ladder,
                               const LargeWorkspace& workspace, const SplitMatrices& M,
                               cudaStream_t stream) {
  LargeKernels::begin(arguments, ladder, workspace, M, stream);
  return cudaGetLastError();
}

cudaError_t finish_inverse_root(const InverseRoot& arguments, const LargeWorkspace& workspace,
                                const RootOfSteps& roots, cudaStream_t stream) {
  LargeKernels::finish(arguments, workspace, roots, stream);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
