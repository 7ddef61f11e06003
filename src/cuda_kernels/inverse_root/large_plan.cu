#include "cuda_kernels/common/triangle.cuh"
#include "cuda_kernels/inverse_root/large_inverse_root.h"
#include "cuda_kernels/inverse_root/symmetric_bands.cuh"
#include "cuda_kernels/split_gemm/split_mma.cuh"
#include "cuda_kernels/split_gemm/symmetric_product.h"

#include <climits>

namespace torchium::cuda_kernels {
namespace {

// Sums the bands of each matrix; one warp per matrix.
__global__ void __launch_bounds__(kThreads)
    bound_kernel(const __grid_constant__ InverseRoot arguments, const double* partials,
                 SpectralBound* bounds, int* starts, int* first_start) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *first_start = INT_MAX;
  const int64_t matrix = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (matrix >= arguments.matrices) return;
  const int bands = bands_of(arguments.rule.n);
  float largest = 0, most = 0;
  double square = 0;
  for (int band = threadIdx.x % 32; band < bands; band += 32) {
    const double* partial = partials + 3 * (matrix * bands + band);
    largest = larger(largest, static_cast<float>(partial[0]));
    most = fmaxf(most, __double2float_ru(partial[1]));
    square += partial[2];
  }
  largest = combine_warp(largest, larger);
  most = combine_warp(most, larger);
  square = warp_sum(square);
  if (threadIdx.x % 32 != 0) return;
  const double divisor = divisor_of(arguments, matrix);
  largest = static_cast<float>(largest / divisor);
  const bool has_root = largest <= FLT_MAX && may_change(arguments, matrix);
  const double eps = eps_of(arguments, matrix);
  const double divided = newton_scale(largest, eps, divisor);
  const double scale = divided / divisor;
  bounds[matrix] = has_root ? bound_spectrum(arguments.rule, eps, divided, divisor, scale * most,
                                             scale * sqrt(square))
                            : SpectralBound{};
  starts[matrix] = has_root ? 0 : INT_MAX;
}

// M = (scale S + damping I) / top. Each block: one tile on or below the diagonal, and its mirror
// image.
__global__ void __launch_bounds__(kThreads)
    fill_kernel(const float* A, int n, const SpectralBound* bounds, SplitMatrices M) {
  const int tiles = triangle_tiles(M.order / kBand);
  const int64_t matrix = blockIdx.x / tiles;
  const TriangleTile place(static_cast<int>(blockIdx.x % tiles));
  const int row = place.row * kBand, column = place.column * kBand;
  const SpectralBound bound = bounds[matrix];
  if (bound.scale == 0) return;
  const auto scale = static_cast<float>(bound.scale);
  const auto inverse_top = static_cast<float>(1 / bound.top);
  const auto shift = static_cast<float>(bound.damping / bound.top);
  __shared__ SymmetricTile tile;
  tile.put(SymmetricTile::fetch(A + matrix * n * n, n, row, column));
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < kBand; r += kWarps) {
    const bool is_diagonal = row == column && r == lane && row + r < n;
    store_split(M.at(matrix, row + r, column + lane),
                tile.at(r, lane) * scale * inverse_top + (is_diagonal ? shift : 0));
    if (row != column) {
      store_split(M.at(matrix, column + r, row + lane), tile.at(lane, r) * scale * inverse_top);
    }
  }
}

struct PlanOutputs {
  NewtonPlan* plans;
  int* starts;
  int* first_start;
  float4* quadratic;  // [kMaxSteps, matrices], as are the powers
  float4* power;
  float4* last;  // [3, matrices]
  float* units;  // [matrices]: factor of M
  float* targets;
  int order, sums;  // of the squares of a matrix
};

// C = x I + y A B + z D + w E: the coefficients of all products of a matrix. Quadratic steps begin
// at `start`, with M in units that are `unit` times smaller.
__device__ void write_coefficients(const PlanOutputs& out, const RootScheduleTable& schedules,
                                   const NewtonPlan& plan, int64_t matrix, int64_t matrices,
                                   int start, float unit) {
  const int level = plan.level - schedules.lowest_level;
  const float* step = schedules.coefficients + 3 * level * schedules.steps;
  for (int k = start; k < schedules.steps; ++k, step += 3) {
    out.quadratic[k * matrices + matrix] = {step[0], step[2], step[1], 0};
    out.power[k * matrices + matrix] = {0, k == start ? unit : 1, 0, 0};
  }
  const auto [center, a, b, c, d, e, f, g] = schedules.last[level];
  const float h = d / (2 * e);  // (V + h I)^2 = V^2 + d / e V + h^2 I
  out.last[matrix] = {-center, start + 1 == schedules.steps ? unit : 1, 0, 0};
  out.last[matrices + matrix] = {h, 1, f, g};
  out.last[2 * matrices + matrix] = {1 + a - e * h * h, e, b, c};
}

// The bound |S|_F^(1/2) of M, with a margin because the tensor cores truncate the squares.
__device__ SpectralBound refined(SpectralBound bound, const NewtonRule& rule, double squares) {
  constexpr double kSlack = 1.0 + 0x1p-14;
  const double top = fmax(bound.top * sqrt(sqrt(squares)) * kSlack, least_top(rule, bound.divided));
  bound.top = fmin(bound.top, top);
  return bound;
}

// One block per matrix: its plan, the coefficients of its steps and target = D v in units of top.
__global__ void __launch_bounds__(kThreads)
    plan_kernel(const __grid_constant__ InverseRoot arguments,
                const __grid_constant__ RootScheduleTable schedules, const SpectralBound* bounds,
                const double* images, const float* squares, PlanOutputs out) {
  const int64_t matrix = blockIdx.x;
  const SpectralBound first = bounds[matrix];
  __shared__ NewtonPlan plan;
  __shared__ double sums[kWarps];
  double square = 0;
  for (int i = threadIdx.x; i < out.sums; i += kThreads) square += squares[matrix * out.sums + i];
  square = block_sum(square, sums);
  if (threadIdx.x == 0) {
    const bool is_finite = first.scale != 0;
    const SpectralBound bound = refined(first, arguments.rule, square);
    plan = plan_newton(arguments.rule, schedules, is_finite, bound, arguments.damping + matrix,
                       arguments.floor + matrix);
    out.plans[matrix] = plan;
    const int start = is_finite ? schedules.steps - plan.steps : INT_MAX;
    const auto unit = static_cast<float>(first.top / bound.top);
    out.starts[matrix] = start;
    atomicMin(out.first_start, start);
    out.units[matrix] = unit;
    if (is_finite) {
      write_coefficients(out, schedules, plan, matrix, arguments.matrices, start, unit);
    }
  }
  __syncthreads();
  const int n = arguments.rule.n;
  const double unit = double{plan.scale} * plan.inverse_top;
  for (int i = threadIdx.x; i < out.order; i += kThreads) {
    const int64_t j = matrix * out.order + i;
    out.targets[j] = i < n ? static_cast<float>(images[j] * unit + plan.shift * probe_sign(i)) : 0;
  }
}

// Inputs of a step, or of the last one, for matrices that start there; eight consecutive elements
// per thread.
__global__ void __launch_bounds__(kThreads)
    start_kernel(const __grid_constant__ InverseRoot arguments,
                 const __grid_constant__ RootScheduleTable schedules,
                 const __grid_constant__ LargeOperands operands, const NewtonPlan* plans,
                 const int* starts, const float* units, int64_t blocks_of_matrix) {
  const int order = operands.M.order;
  const auto [matrix, row, column] = piece_of_thread(order, blocks_of_matrix);
  const int start = starts[matrix];
  if (row >= order || start > schedules.steps) return;
  const float unit = units[matrix];
  const int level = plans[matrix].level - schedules.lowest_level;
  const bool has_diagonal = row >= column && row < column + 8 && row < arguments.rule.n;
  float M[8];
  load_eight(operands.M.at(matrix, row, column), M);
#pragma unroll
  for (int i = 0; i < 8; ++i) M[i] *= unit;
  if (start == schedules.steps) {
    float X[8] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (has_diagonal && row == column + i) {
        M[i] -= schedules.last[level].center;
        X[i] = 1;
      }
    }
    store_eight<false>(operands.Z.matrix(matrix) + int64_t{row} * order + column, M);
    store_eight(operands.X.at(matrix, row, column), X);
    return;
  }
  const LargeOperands::Step& step = operands.steps[start];
  const float* q = schedules.coefficients + 3 * level * schedules.steps;
  float S[8];
  load_eight(operands.S.at(matrix, row, column), S);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    S[i] = fmaf(q[2] * unit * unit, S[i], q[1] * M[i]);
    if (has_diagonal && row == column + i) S[i] += q[0];
    M[i] /= unit;
  }
  store_eight(step.X.at(matrix, row, column), S);
  if (step.M.data != operands.M.data) store_eight(step.M.at(matrix, row, column), M);
}

// Allocates parts of one buffer.
class Pieces {
 public:
  explicit Pieces(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <typename T>
  void take(T*& piece, int64_t count) {
    piece = reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * sizeof(T) + 255) / 256 * 256;
  }
  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

}  // namespace

LargeWorkspace::LargeWorkspace(void* memory, int64_t matrices, int order) : matrices_(matrices) {
  Pieces pieces(memory);
  pieces.take(bounds, matrices);
  pieces.take(plans, matrices);
  pieces.take(images, matrices * order);
  pieces.take(partials, 3 * matrices * bands_of(order));
  pieces.take(vectors, 3 * matrices * order);
  pieces.take(largest, matrices * order);
  pieces.take(squares, matrices * product_sums(order));
  pieces.take(starts, matrices);
  pieces.take(first_start, 1);
  pieces.take(units, matrices);
  pieces.take(coefficients_, 4 * matrices * (2 * RootScheduleTable::kMaxSteps + 3));
  bytes = pieces.used();
}

cudaError_t fill_inverse_root(const InverseRoot& arguments, const LargeWorkspace& w,
                              const SplitMatrices& M, cudaStream_t stream) {
  const int n = arguments.rule.n;
  const int64_t matrices = arguments.matrices;
  band_kernel<true><<<blocks(matrices * bands_of(n)), kThreads, 0, stream>>>(
      arguments.A, n, nullptr, M.order, w.images, w.partials);
  bound_kernel<<<blocks((matrices + kWarps - 1) / kWarps), kThreads, 0, stream>>>(
      arguments, w.partials, w.bounds, w.starts, w.first_start);
  fill_kernel<<<blocks(matrices * triangle_tiles(M.order / kBand)), kThreads, 0, stream>>>(
      arguments.A, n, w.bounds, M);
  return cudaGetLastError();
}

cudaError_t start_inverse_root(const InverseRoot& arguments, const RootScheduleTable& schedules,
                               const LargeWorkspace& w, const LargeOperands& operands,
                               cudaStream_t stream) {
  const int order = operands.M.order;
  const int64_t matrices = arguments.matrices;
  const auto as_float4 = [](float* row) { return reinterpret_cast<float4*>(row); };
  plan_kernel<<<blocks(matrices), kThreads, 0, stream>>>(
      arguments, schedules, w.bounds, w.images, w.squares,
      {w.plans, w.starts, w.first_start, as_float4(w.quadratic(0)), as_float4(w.power(0)),
       as_float4(w.last_Z()), w.units, w.vectors, order, product_sums(order)});
  const int64_t blocks_of_matrix = blocks_of_pieces(order);
  start_kernel<<<blocks(matrices * blocks_of_matrix), kThreads, 0, stream>>>(
      arguments, schedules, operands, w.plans, w.starts, w.units, blocks_of_matrix);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
