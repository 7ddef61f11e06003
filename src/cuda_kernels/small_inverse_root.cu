#include "cuda_kernels/newton_plan.cuh"
#include "cuda_kernels/small_inverse_root.h"
#include "cuda_kernels/split_mma.cuh"

namespace torchium::cuda_kernels {
namespace {

// A block holds one matrix of up to N x N; each warp owns a square tile of it. The smallest one has
// a second warp that only shares the rest of the work.
template <int N>
struct Layout {
  static constexpr int kTile = N < 32 ? N : 32;
  static constexpr int kWarpsAcross = N / kTile;
  static constexpr int kWarps = N < 32 ? 2 : kWarpsAcross * kWarpsAcross;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowTiles = kTile / 16;  // of an mma
  static constexpr int kColumnTiles = kTile / 8;
  static constexpr int kStride = N + 8;        // rows start in different banks
  static constexpr int kHalves = N * kStride;  // of hi, and of lo
  static constexpr int kSharedBytes = 3 * 2 * kHalves * static_cast<int>(sizeof(__half));
};

template <int N>
struct SplitMatrix {
  __half* hi;
  __half* lo;
  __device__ explicit SplitMatrix(__half* data) : hi(data), lo(data + Layout<N>::kHalves) {}
  __device__ float at(int offset) const { return join(hi[offset], lo[offset]); }
};

// Sums (or maxima) over the block, the same in every thread; NaN wins a maximum. `scratch` has one
// float a warp, and may be used again after the next barrier but one.
template <int N, bool is_sum>
__device__ float reduce(float x, float* scratch) {
  const auto combine = [](float a, float b) { return is_sum ? a + b : (a > b || a != a ? a : b); };
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = combine(x, __shfl_xor_sync(0xffffffff, x, offset));
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = scratch[0];
  for (int warp = 1; warp < Layout<N>::kWarps; ++warp) x = combine(x, scratch[warp]);
  return x;
}

template <int N>
class SmallRoot {
  using L = Layout<N>;
  using Accumulators = float[L::kRowTiles][L::kColumnTiles][4];

 public:
  __device__ SmallRoot(const InverseRoot& arguments, const SmallLadder& ladder, __half* shared,
                       float* scratch, float (*vectors)[N], NewtonPlan* plan)
      : args_(arguments),
        ladder_(ladder),
        n_(arguments.rule.n),
        M_(shared),
        X_(shared + 2 * L::kHalves),
        Q_(shared + 4 * L::kHalves),
        dense_(reinterpret_cast<float*>(shared)),
        staging_(reinterpret_cast<float*>(shared + 2 * L::kHalves)),
        scratch_(scratch),
        vectors_(vectors),
        plan_(*plan),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        row_(warp_ / L::kWarpsAcross * L::kTile),
        column_(warp_ % L::kWarpsAcross * L::kTile) {}

  __device__ void run(int64_t matrix) {
    load(matrix);
    make_plan(matrix);
    if (plan_.steps == NewtonPlan::kNotFinite) {
      write_nan(matrix);
      return;
    }
    fill_M();
    iterate();
    const float largest = symmetrise();
    load(matrix);
    float residual = probe_residual(/*by_identity=*/false);
    const bool accepted = residual <= args_.rule.residual_tolerance && largest <= plan_.limit;
    if (!accepted) residual = probe_residual(/*by_identity=*/true);
    write(matrix, accepted, residual);
  }

 private:
  // A into the staging area, in rows of n + 1.
  __device__ void load(int64_t matrix) {
    const float* A = args_.A + matrix * n_ * n_;
    __syncthreads();
    for (int i = threadIdx.x; i < n_ * n_; i += L::kThreads) {
      staging_[i / n_ * (n_ + 1) + i % n_] = A[i];
    }
    __syncthreads();
  }

  // An entry of the symmetric part of A. Halves are added, because a sum may overflow.
  __device__ float symmetric(int i, int j) const {
    return 0.5f * staging_[i * (n_ + 1) + j] + 0.5f * staging_[j * (n_ + 1) + i];
  }

  __device__ void make_plan(int64_t matrix) {
    float largest = 0;
    for (int i = threadIdx.x; i < n_ * n_; i += L::kThreads) {
      const float x = fabsf(staging_[i / n_ * (n_ + 1) + i % n_]);
      largest = largest > x || largest != largest ? largest : x;
    }
    largest = reduce<N, false>(largest, scratch_);
    const bool finite = largest <= FLT_MAX;
    const float scale = newton_scale(largest, args_.rule.eps);

    float most = 0, square = 0;
    for (int i = warp_; i < n_; i += L::kWarps) {
      float sum = 0;
      for (int j = lane_; j < n_; j += 32) {
        const float x = fabsf(symmetric(i, j) * scale);
        sum += x;
        square = fmaf(x, x, square);
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, offset);
      }
      most = fmaxf(most, sum);
    }
    most = reduce<N, false>(most, scratch_);
    square = reduce<N, true>(square, scratch_);
    if (threadIdx.x == 0) {
      plan_ = plan_newton(args_.rule, ladder_, finite, scale, most, sqrtf(square),
                          args_.damping + matrix, args_.floor + matrix);
    }
    __syncthreads();
  }

  // M = (S + damping I) / top, zero outside n x n.
  __device__ void fill_M() {
    const int padded = min(N, (n_ + L::kTile - 1) / L::kTile * L::kTile);
    for (int e = threadIdx.x; e < padded * padded; e += L::kThreads) {
      const int i = e / padded, j = e % padded;
      float x = 0;
      if (i < n_ && j < n_) {
        x = symmetric(i, j) * plan_.scale * plan_.inverse_top;
        if (i == j) x += plan_.shift;
      }
      split(x, M_.hi[i * L::kStride + j], M_.lo[i * L::kStride + j]);
    }
    __syncthreads();
  }

  // c = A B for the tile of this warp.
  __device__ void multiply(const SplitMatrix<N>& A, const SplitMatrix<N>& B,
                           Accumulators& c) const {
    Accumulators cross;
#pragma unroll
    for (int i = 0; i < L::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < L::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) c[i][j][e] = cross[i][j][e] = 0;
      }
    }
    const int a_offset = (row_ + lane_ % 16) * L::kStride + lane_ / 16 * 8;
    const int b_offset = lane_ % 16 * L::kStride + column_ + lane_ / 16 * 8;
    for (int k = 0; k < n_; k += 16) {
      uint32_t a_hi[L::kRowTiles][4], a_lo[L::kRowTiles][4];
#pragma unroll
      for (int i = 0; i < L::kRowTiles; ++i) {
        load_matrices(a_hi[i], A.hi + a_offset + 16 * i * L::kStride + k);
        load_matrices(a_lo[i], A.lo + a_offset + 16 * i * L::kStride + k);
      }
#pragma unroll
      for (int j = 0; j < L::kColumnTiles; j += 2) {
        uint32_t b_hi[4], b_lo[4];
        load_transposed_matrices(b_hi, B.hi + b_offset + k * L::kStride + 8 * j);
        load_transposed_matrices(b_lo, B.lo + b_offset + k * L::kStride + 8 * j);
#pragma unroll
        for (int i = 0; i < L::kRowTiles; ++i) {
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            mma(c[i][j + side], a_hi[i], b_hi[2 * side], b_hi[2 * side + 1]);
            mma(cross[i][j + side], a_hi[i], b_lo[2 * side], b_lo[2 * side + 1]);
            mma(cross[i][j + side], a_lo[i], b_hi[2 * side], b_hi[2 * side + 1]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < L::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < L::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          c[i][j][e] = fmaf(cross[i][j][e], 1.0f / kLowScale, c[i][j][e]);
        }
      }
    }
  }

  // body(row, column, c0, c1) for the pairs of neighbours that this thread holds.
  template <typename Body>
  __device__ void for_each_pair(const Accumulators& c, const Body& body) const {
#pragma unroll
    for (int i = 0; i < L::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < L::kColumnTiles; ++j) {
        const int row = row_ + 16 * i + lane_ / 4;
        const int column = column_ + 8 * j + lane_ % 4 * 2;
        body(row, column, c[i][j][0], c[i][j][1]);
        body(row + 8, column, c[i][j][2], c[i][j][3]);
      }
    }
  }

  __device__ bool has_work() const { return row_ < n_ && column_ < n_; }

  __device__ static void store(const SplitMatrix<N>& A, int offset, float x, float y) {
    store_split(A.hi + offset, A.lo + offset, x, y);
  }

  // C <- A B, where C may be A or B.
  __device__ void multiply_into(const SplitMatrix<N>& C, const SplitMatrix<N>& A,
                                const SplitMatrix<N>& B) const {
    Accumulators c;
    if (has_work()) multiply(A, B, c);
    __syncthreads();
    if (has_work()) {
      for_each_pair(c, [&](int row, int column, float x, float y) {
        store(C, row * L::kStride + column, x, y);
      });
    }
    __syncthreads();
  }

  // Q <- a I + b M + c M^2
  __device__ void evaluate(const double* step) const {
    const auto a = static_cast<float>(step[0]);
    const auto b = static_cast<float>(step[1]);
    const auto c = static_cast<float>(step[2]);
    Accumulators square;
    if (has_work()) {
      multiply(M_, M_, square);
      for_each_pair(square, [&](int row, int column, float x, float y) {
        const int offset = row * L::kStride + column;
        x = fmaf(c, x, b * M_.at(offset));
        y = fmaf(c, y, b * M_.at(offset + 1));
        if (row == column && row < n_) x += a;
        if (row == column + 1 && row < n_) y += a;
        store(Q_, offset, x, y);
      });
    }
    __syncthreads();
  }

  // X <- first Q
  __device__ void start_X() const {
    if (has_work()) {
      for (int e = lane_; e < L::kTile * L::kTile; e += 32) {
        const int offset = (row_ + e / L::kTile) * L::kStride + column_ + e % L::kTile;
        split(args_.rule.first * Q_.at(offset), X_.hi[offset], X_.lo[offset]);
      }
    }
    __syncthreads();
  }

  // The root of M times `first`, to X in split form.
  __device__ void iterate() const {
    const int index = (plan_.rung - ladder_.lowest_rung) * ladder_.steps;
    for (int k = 0; k < plan_.steps; ++k) {
      evaluate(ladder_.coefficients + 3 * (index + k));
      if (k == 0) {
        start_X();
      } else {
        multiply_into(X_, X_, Q_);
      }
      if (k + 1 == plan_.steps) return;
      for (int p = args_.rule.p;; p /= 2) {  // M <- M Q^p
        if (p % 2 == 1) multiply_into(M_, M_, Q_);
        if (p == 1) break;
        multiply_into(Q_, Q_, Q_);
      }
    }
  }

  // The root of M as floats, in rows of n + 1 where M was; the largest magnitude.
  __device__ float symmetrise() const {
    const float unit = 0.5f / args_.rule.first;
    float largest = 0;
    for (int e = threadIdx.x; e < n_ * n_; e += L::kThreads) {
      const int i = e / n_, j = e % n_;
      const float x = unit * (X_.at(i * L::kStride + j) + X_.at(j * L::kStride + i));
      dense_[i * (n_ + 1) + j] = x;
      largest = largest > fabsf(x) || largest != largest ? largest : fabsf(x);
    }
    return reduce<N, false>(largest, scratch_);
  }

  // out = D in, or X in, or in.
  enum class Operator { kDamped, kRoot, kIdentity };
  __device__ void apply(Operator op, const float* in, float* out) const {
    for (int i = warp_; i < n_; i += L::kWarps) {
      float sum = 0;
      if (op == Operator::kIdentity) {
        sum = in[i];
      } else {
        for (int j = lane_; j < n_; j += 32) {
          float x = op == Operator::kRoot ? dense_[i * (n_ + 1) + j]
                                          : symmetric(i, j) * plan_.scale * plan_.inverse_top;
          if (op == Operator::kDamped && i == j) x += plan_.shift;
          sum = fmaf(x, in[j], sum);
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
          sum += __shfl_xor_sync(0xffffffff, sum, offset);
        }
      }
      if (lane_ == 0) out[i] = sum;
    }
    __syncthreads();
  }

  // |D X^p D v - D v| / |D|_F, everything in units of top.
  __device__ float probe_residual(bool by_identity) const {
    float* target = vectors_[0];
    __syncthreads();
    for (int i = threadIdx.x; i < n_; i += L::kThreads) vectors_[1][i] = probe_sign(i);
    __syncthreads();
    apply(Operator::kDamped, vectors_[1], target);
    apply(Operator::kIdentity, target, vectors_[1]);
    int current = 1;
    for (int power = by_identity ? args_.rule.p : 0; power < args_.rule.p;
         ++power, current = 3 - current) {
      apply(Operator::kRoot, vectors_[current], vectors_[3 - current]);
    }
    apply(Operator::kDamped, vectors_[current], vectors_[3 - current]);
    float difference = 0;
    for (int i = threadIdx.x; i < n_; i += L::kThreads) {
      const float error = vectors_[3 - current][i] - target[i];
      difference = fmaf(error, error, difference);
    }
    return sqrtf(reduce<N, true>(difference, scratch_)) / plan_.norm;
  }

  __device__ void write(int64_t matrix, bool accepted, float residual) const {
    float* root = args_.root + matrix * n_ * n_;
    for (int e = threadIdx.x; e < n_ * n_; e += L::kThreads) {
      const int i = e / n_, j = e % n_;
      const float identity = i == j ? 1.0f : 0.0f;
      root[e] = saturated(plan_.factor * (accepted ? dense_[i * (n_ + 1) + j] : identity));
    }
    if (threadIdx.x == 0) {
      args_.residual[matrix] = residual;
      args_.iterations[matrix] = accepted ? plan_.steps : 0;
    }
  }

  __device__ void write_nan(int64_t matrix) const {
    float* root = args_.root + matrix * n_ * n_;
    for (int e = threadIdx.x; e < n_ * n_; e += L::kThreads) root[e] = NAN;
    if (threadIdx.x == 0) {
      args_.residual[matrix] = NAN;
      args_.iterations[matrix] = 0;
    }
  }

  const InverseRoot& args_;
  const SmallLadder& ladder_;
  const int n_;
  const SplitMatrix<N> M_, X_, Q_;
  float* const dense_;    // in the place of M
  float* const staging_;  // in the place of X and Q
  float* const scratch_;
  float (*const vectors_)[N];
  NewtonPlan& plan_;
  const int warp_, lane_, row_, column_;
};

template <int N>
__global__ void __launch_bounds__(Layout<N>::kThreads)
    small_inverse_root_kernel(const __grid_constant__ InverseRoot arguments,
                              const __grid_constant__ SmallLadder ladder) {
  extern __shared__ __align__(16) __half shared[];
  __shared__ float scratch[Layout<N>::kWarps];
  __shared__ float vectors[3][N];
  __shared__ NewtonPlan plan;
  SmallRoot<N>(arguments, ladder, shared, scratch, vectors, &plan).run(blockIdx.x);
}

template <int N>
cudaError_t launch(const InverseRoot& arguments, const SmallLadder& ladder, cudaStream_t stream) {
  constexpr int kBytes = Layout<N>::kSharedBytes;
  const cudaError_t error = cudaFuncSetAttribute(
      small_inverse_root_kernel<N>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  small_inverse_root_kernel<N>
      <<<static_cast<unsigned>(arguments.matrices), Layout<N>::kThreads, kBytes, stream>>>(
          arguments, ladder);
  return cudaGetLastError();
}

}  // namespace

int small_inverse_root_shared_bytes(int n) {
  // Beside it the vectors, the plan and the like.
  constexpr int kStatic = 2048;
  if (n <= 16) return kStatic + Layout<16>::kSharedBytes;
  if (n <= 32) return kStatic + Layout<32>::kSharedBytes;
  if (n <= 64) return kStatic + Layout<64>::kSharedBytes;
  return kStatic + Layout<128>::kSharedBytes;
}

cudaError_t small_inverse_root(const InverseRoot& arguments, const SmallLadder& ladder,
                               cudaStream_t stream) {
  if (arguments.matrices == 0) return cudaSuccess;
  if (arguments.rule.n <= 16) return launch<16>(arguments, ladder, stream);
  if (arguments.rule.n <= 32) return launch<32>(arguments, ladder, stream);
  if (arguments.rule.n <= 64) return launch<64>(arguments, ladder, stream);
  return launch<128>(arguments, ladder, stream);
}

}  // namespace torchium::cuda_kernels
