#include "cuda_kernels/common/warp_sums.cuh"
#include "cuda_kernels/inverse_root/newton_plan.cuh"
#include "cuda_kernels/inverse_root/small_inverse_root.h"
#include "cuda_kernels/split_gemm/split_mma.cuh"

#include <cuda_pipeline.h>

namespace torchium::cuda_kernels {
namespace {

// A block holds one matrix of up to N x N; each warp owns a square tile. The smallest size has a
// second warp, which shares only the other work.
template <int N>
struct Layout {
  static constexpr int kTile = N < 32 ? N : 32;
  static constexpr int kWarpsAcross = N / kTile;
  static constexpr int kWarps = N < 32 ? 2 : kWarpsAcross * kWarpsAcross;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kShares = kThreads / N;  // threads per row in a matrix-vector product
  static constexpr int kRowTiles = kTile / 16;  // of an mma
  static constexpr int kColumnTiles = kTile / 8;
  static constexpr int kStride = N + 8;          // rows start in different banks
  static constexpr int kElements = N * kStride;  // of hi, and of lo
  static constexpr int kSharedBytes = 3 * 2 * kElements * static_cast<int>(sizeof(__half));
};

template <int N>
struct SplitMatrix {
  static constexpr bool kIsSplit = true;
  __half* hi;
  __half* lo;
  __device__ explicit SplitMatrix(__half* data) : hi(data), lo(data + Layout<N>::kElements) {}
  __device__ float at(int offset) const { return join(hi[offset], lo[offset]); }
  // Consecutive elements of a row.
  __device__ float2 pair(int offset) const {
    const auto high = *reinterpret_cast<const __half2*>(hi + offset);
    const auto low = *reinterpret_cast<const __half2*>(lo + offset);
    return {join(high.x, low.x), join(high.y, low.y)};
  }
  __device__ void store(int offset, float x, float y) const {
    store_split(hi + offset, lo + offset, x, y);
  }
};

// Entries of one fp16 number each, or the hi parts of a split matrix.
struct Fp16Matrix {
  static constexpr bool kIsSplit = false;
  __half* hi;
  __device__ float2 pair(int offset) const {
    return __half22float2(*reinterpret_cast<const __half2*>(hi + offset));
  }
  __device__ void store(int offset, float x, float y) const {
    *reinterpret_cast<__half2*>(hi + offset) = __floats2half2_rn(x, y);
  }
};

__device__ float2 operator+(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
__device__ float2 operator*(float a, float2 b) { return {a * b.x, a * b.y}; }

// Sums (or maxima) over the block, the same in every thread; NaN wins a maximum. `scratch` has one
// float per warp and may be reused after the second barrier from here.
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
  __device__ SmallRoot(const InverseRoot& arguments, const RootScheduleTable& schedules,
                       __half* shared, float* scratch, float (*vectors)[N], float (*shares)[N],
                       NewtonPlan* plan)
      : args_(arguments),
        schedules_(schedules),
        n_(arguments.rule.n),
        M_(shared),
        X_(shared + 2 * L::kElements),
        Q_(shared + 4 * L::kElements),
        dense_(reinterpret_cast<float*>(shared + 2 * L::kElements)),
        staging_(reinterpret_cast<float*>(shared + 4 * L::kElements)),
        scratch_(scratch),
        vectors_(vectors),
        shares_(shares),
        plan_(*plan),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        row_(warp_ / L::kWarpsAcross * L::kTile),
        column_(warp_ % L::kWarpsAcross * L::kTile) {}

  __device__ void run(int64_t matrix) {
    if (!may_change(args_, matrix)) return;
    start_load(matrix);
    finish_load();
    make_plan(matrix);
    if (plan_.steps == NewtonPlan::kNotFinite) {
      write_nan(matrix);
      return;
    }
    fill_M();
    iterate();
    start_load(matrix);
    const float largest = symmetrise();
    finish_load();
    float residual = probe_residual(/*by_identity=*/false);
    const bool accepted = accepts(args_, plan_, residual, largest);
    if (!accepted) residual = probe_residual(/*by_identity=*/true);
    write(matrix, accepted, residual);
  }

 private:
  // body(row, column) for the entries of the leading block of an order; neighbours in a row are
  // neighbours in a warp.
  template <typename Body>
  __device__ void for_each_entry(int order, const Body& body) const {
    for (int i = warp_; i < order; i += L::kWarps) {
      for (int j = lane_; j < order; j += 32) body(i, j);
    }
  }

  // A to the staging area, in rows of n + 1.
  __device__ void start_load(int64_t matrix) {
    const float* A = args_.A + matrix * n_ * n_;
    for_each_entry(n_, [&](int i, int j) {
      __pipeline_memcpy_async(staging_ + i * (n_ + 1) + j, A + i * n_ + j, sizeof(float));
    });
    __pipeline_commit();
  }

  __device__ void finish_load() {
    __pipeline_wait_prior(0);
    __syncthreads();
  }

  // An entry of the symmetric part of A, as a / 2 + b / 2, because a + b may overflow.
  __device__ float symmetric(int i, int j) const {
    return 0.5f * staging_[i * (n_ + 1) + j] + 0.5f * staging_[j * (n_ + 1) + i];
  }

  __device__ void make_plan(int64_t matrix) {
    float largest = 0;
    for_each_entry(n_, [&](int i, int j) {
      const float x = fabsf(staging_[i * (n_ + 1) + j]);
      largest = largest > x || largest != largest ? largest : x;
    });
    largest = reduce<N, false>(largest, scratch_);
    const double divisor = divisor_of(args_, matrix);
    if (args_.divisors != nullptr) largest = static_cast<float>(largest / divisor);
    const bool finite = largest <= FLT_MAX;
    const double eps = eps_of(args_, matrix);
    const float divided = newton_scale(largest, eps, divisor);
    const float scale = args_.divisors == nullptr ? divided : static_cast<float>(divided / divisor);

    float most = 0, square = 0;
    for (int i = warp_; i < n_; i += L::kWarps) {
      float sum = 0;
      for (int j = lane_; j < n_; j += 32) {
        const float x = fabsf(symmetric(i, j) * scale);
        sum += x;
        square = fmaf(x, x, square);
      }
      most = fmaxf(most, warp_sum(sum));
    }
    most = reduce<N, false>(most, scratch_);
    square = reduce<N, true>(square, scratch_);
    if (threadIdx.x == 0) {
      plan_ = plan_newton(args_.rule, schedules_, finite,
                          bound_spectrum(args_.rule, eps, divided, divisor, most, sqrtf(square)),
                          args_.damping + matrix, args_.floor + matrix);
    }
    __syncthreads();
  }

  // M = (S + damping I) / top, zero outside n x n.
  __device__ void fill_M() {
    const int padded = min(N, (n_ + L::kTile - 1) / L::kTile * L::kTile);
    for_each_entry(padded, [&](int i, int j) {
      float x = 0;
      if (i < n_ && j < n_) {
        x = symmetric(i, j) * plan_.scale * plan_.inverse_top;
        if (i == j) x += plan_.shift;
      }
      split(x, M_.hi[i * L::kStride + j], M_.lo[i * L::kStride + j]);
    });
    __syncthreads();
  }

  // c = A B for this warp's tile. The tensor cores truncate as they accumulate, so for split
  // matrices they sum only 16 terms, and these sums are added in float32.
  template <typename Matrix>
  __device__ void multiply(const Matrix& A, const Matrix& B, Accumulators& c) const {
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
        if constexpr (Matrix::kIsSplit) {
          load_matrices(a_lo[i], A.lo + a_offset + 16 * i * L::kStride + k);
        }
      }
#pragma unroll
      for (int j = 0; j < L::kColumnTiles; j += 2) {
        uint32_t b_hi[4], b_lo[4];
        load_matrices<true>(b_hi, B.hi + b_offset + k * L::kStride + 8 * j);
        if constexpr (Matrix::kIsSplit) {
          load_matrices<true>(b_lo, B.lo + b_offset + k * L::kStride + 8 * j);
        }
#pragma unroll
        for (int i = 0; i < L::kRowTiles; ++i) {
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            if constexpr (!Matrix::kIsSplit) {
              mma(c[i][j + side], a_hi[i], b_hi[2 * side], b_hi[2 * side + 1]);
            } else {
              float sum[4] = {};
              mma(sum, a_hi[i], b_hi[2 * side], b_hi[2 * side + 1]);
#pragma unroll
              for (int e = 0; e < 4; ++e) c[i][j + side][e] += sum[e];
              mma(cross[i][j + side], a_hi[i], b_lo[2 * side], b_lo[2 * side + 1]);
              mma(cross[i][j + side], a_lo[i], b_hi[2 * side], b_hi[2 * side + 1]);
            }
          }
        }
      }
    }
    if constexpr (Matrix::kIsSplit) {
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
  }

  // body(row, column, c0, c1) for this thread's pairs of adjacent elements.
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

  // C <- A B, where C may be A or B.
  __device__ void multiply_into(const SplitMatrix<N>& C, const SplitMatrix<N>& A,
                                const SplitMatrix<N>& B) const {
    Accumulators c;
    if (has_work()) multiply(A, B, c);
    __syncthreads();
    if (has_work()) {
      for_each_pair(c, [&](int row, int column, float x, float y) {
        C.store(row * L::kStride + column, x, y);
      });
    }
    __syncthreads();
  }

  // C <- factor A B + rest + diagonal I. rest(offset): two adjacent elements. is_in_place: C shares
  // memory with A or B.
  template <bool is_in_place = false, typename Result, typename Matrix, typename Rest>
  __device__ void combine_into(const Result& C, float factor, const Matrix& A, const Matrix& B,
                               const Rest& rest, float diagonal) const {
    Accumulators c;
    if (has_work()) multiply(A, B, c);
    if (is_in_place) __syncthreads();
    if (has_work()) {
      for_each_pair(c, [&](int row, int column, float x, float y) {
        const int offset = row * L::kStride + column;
        float2 sum = rest(offset) + factor * float2{x, y};
        if (row == column && row < n_) sum.x += diagonal;
        if (row == column + 1 && row < n_) sum.y += diagonal;
        C.store(offset, sum.x, sum.y);
      });
    }
    __syncthreads();
  }

  // X <- first times a matrix of entry(row, column).
  template <typename Entry>
  __device__ void start_X(const Entry& entry) const {
    if (has_work()) {
      for (int e = lane_; e < L::kTile * L::kTile; e += 32) {
        const int row = row_ + e / L::kTile, column = column_ + e % L::kTile;
        const int offset = row * L::kStride + column;
        split(args_.rule.first * entry(row, column), X_.hi[offset], X_.lo[offset]);
      }
    }
    __syncthreads();
  }

  // The root of M times `first`, to M in split form.
  __device__ void iterate() const {
    const int level = plan_.level - schedules_.lowest_level;
    const float* step = schedules_.coefficients + 3 * level * schedules_.steps;
    for (int k = 0; k < plan_.steps; ++k, step += 3) {
      combine_into(
          Q_, step[2], M_, M_, [&](int offset) { return step[1] * M_.pair(offset); }, step[0]);
      if (k == 0) {
        start_X([&](int row, int column) { return Q_.at(row * L::kStride + column); });
      } else {
        multiply_into(X_, X_, Q_);
      }
      for (int p = args_.rule.p;; p /= 2) {  // M <- M Q^p
        if (p % 2 == 1) multiply_into(M_, M_, Q_);
        if (p == 1) break;
        multiply_into(Q_, Q_, Q_);
      }
    }
    if (plan_.steps == 0) {
      start_X([](int row, int column) { return row == column ? 1.0f : 0.0f; });
    }
    take_last_step(schedules_.last[level]);
  }

  // M <- X + X W (root_schedule_table.h). S and V use half of Q's memory each, W all of it: its
  // product with X is one of split matrices, because rounding either would be most of the error.
  __device__ void take_last_step(const LastStep& step) const {
    for (int i = threadIdx.x; i < n_; i += L::kThreads) {
      const int offset = i * (L::kStride + 1);
      split(M_.at(offset) - step.center, M_.hi[offset], M_.lo[offset]);
    }
    __syncthreads();
    const Fp16Matrix Z{M_.hi}, S{Q_.hi}, V{Q_.lo};
    combine_into(
        S, 1, Z, Z,
        [](int) {
          return float2{0, 0};
        },
        0);
    combine_into(
        V, 1, Z, S, [&](int i) { return step.f * S.pair(i) + step.g * M_.pair(i); }, 0);
    combine_into</*is_in_place=*/true>(
        Q_, step.e, V, V,
        [&](int i) { return step.b * M_.pair(i) + step.c * S.pair(i) + step.d * V.pair(i); },
        step.a);
    combine_into(
        M_, 1, X_, Q_, [&](int i) { return X_.pair(i); }, 0);
  }

  // The root of M as floats, in rows of n + 1 in place of X; returns the largest magnitude.
  __device__ float symmetrise() const {
    const float unit = 0.5f / args_.rule.first;
    float largest = 0;
    for_each_entry(n_, [&](int i, int j) {
      const float x = unit * (M_.at(i * L::kStride + j) + M_.at(j * L::kStride + i));
      dense_[i * (n_ + 1) + j] = x;
      largest = largest > fabsf(x) || largest != largest ? largest : fabsf(x);
    });
    return reduce<N, false>(largest, scratch_);
  }

  // out = A in for symmetric A; entry(i, j) is A_ij. Adjacent lanes process adjacent rows.
  template <typename Entry>
  __device__ void apply(const Entry& entry, const float* in, float* out) const {
    const int row = threadIdx.x % N;
    const int share = threadIdx.x / N;  // of the columns
    float sum = 0;
    if (row < n_) {
      for (int j = share; j < n_; j += L::kShares) sum = fmaf(entry(j, row), in[j], sum);
    }
    shares_[share][row] = sum;
    __syncthreads();
    if (share == 0) {
#pragma unroll
      for (int other = 1; other < L::kShares; ++other) sum += shares_[other][row];
      out[row] = sum;
    }
    __syncthreads();
  }

  // |D X^p D v - D v| / |D|_F, everything in units of top.
  __device__ float probe_residual(bool by_identity) const {
    const auto damped = [&](int i, int j) {
      const float x = symmetric(i, j) * plan_.scale * plan_.inverse_top;
      return i == j ? x + plan_.shift : x;
    };
    const auto root = [&](int i, int j) {
      return by_identity ? (i == j ? 1.0f : 0.0f) : dense_[i * (n_ + 1) + j];
    };
    float *target = vectors_[0], *in = vectors_[1], *out = vectors_[2];
    __syncthreads();
    for (int i = threadIdx.x; i < n_; i += L::kThreads) in[i] = probe_sign(i);
    __syncthreads();
    apply(damped, in, target);
    apply(root, target, out);
    for (int power = 1; power < args_.rule.p; ++power) {
      const auto previous = out;
      out = in;
      in = previous;
      apply(root, in, out);
    }
    apply(damped, out, in);
    float difference = 0;
    for (int i = threadIdx.x; i < n_; i += L::kThreads) {
      const float error = in[i] - target[i];
      difference = fmaf(error, error, difference);
    }
    return sqrtf(reduce<N, true>(difference, scratch_)) / plan_.norm;
  }

  __device__ void write(int64_t matrix, bool accepted, float residual) const {
    float* root = args_.root + matrix * n_ * n_;
    for_each_entry(is_written(args_, matrix, accepted) ? n_ : 0, [&](int i, int j) {
      const float identity = i == j ? 1.0f : 0.0f;
      root[i * n_ + j] = saturated(plan_.factor * (accepted ? dense_[i * (n_ + 1) + j] : identity));
    });
    if (threadIdx.x == 0) {
      args_.residual[matrix] = residual;
      args_.iterations[matrix] = accepted ? plan_.steps + 1 : 0;
      count_failure(args_, matrix, accepted);
    }
  }

  __device__ void write_nan(int64_t matrix) const {
    float* root = args_.root + matrix * n_ * n_;
    const int entries = is_written(args_, matrix, /*accepted=*/false) ? n_ * n_ : 0;
    for (int e = threadIdx.x; e < entries; e += L::kThreads) root[e] = NAN;
    if (threadIdx.x == 0) {
      args_.residual[matrix] = NAN;
      args_.iterations[matrix] = 0;
      count_failure(args_, matrix, /*accepted=*/false);
    }
  }

  const InverseRoot& args_;
  const RootScheduleTable& schedules_;
  const int n_;
  const SplitMatrix<N> M_, X_, Q_;
  float* const dense_;    // in place of X
  float* const staging_;  // in place of Q
  float* const scratch_;
  float (*const vectors_)[N];
  float (*const shares_)[N];
  NewtonPlan& plan_;
  const int warp_, lane_, row_, column_;
};

template <int N>
__global__ void __launch_bounds__(Layout<N>::kThreads)
    small_inverse_root_kernel(const __grid_constant__ InverseRoot arguments,
                              const __grid_constant__ RootScheduleTable schedules) {
  extern __shared__ __align__(16) __half shared[];
  __shared__ float scratch[Layout<N>::kWarps];
  __shared__ float vectors[3][N];
  __shared__ float shares[Layout<N>::kShares][N];
  __shared__ NewtonPlan plan;
  SmallRoot<N>(arguments, schedules, shared, scratch, vectors, shares, &plan).run(blockIdx.x);
}

template <int N>
cudaError_t launch(const InverseRoot& arguments, const RootScheduleTable& schedules,
                   cudaStream_t stream) {
  constexpr int kBytes = Layout<N>::kSharedBytes;
  const cudaError_t error = cudaFuncSetAttribute(
      small_inverse_root_kernel<N>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  small_inverse_root_kernel<N>
      <<<static_cast<unsigned>(arguments.matrices), Layout<N>::kThreads, kBytes, stream>>>(
          arguments, schedules);
  return cudaGetLastError();
}

}  // namespace

int small_inverse_root_shared_bytes(int n) {
  // Static shared memory: vectors, the plan and the like.
  constexpr int kStatic = 4096;
  if (n <= 16) return kStatic + Layout<16>::kSharedBytes;
  if (n <= 32) return kStatic + Layout<32>::kSharedBytes;
  if (n <= 64) return kStatic + Layout<64>::kSharedBytes;
  return kStatic + Layout<128>::kSharedBytes;
}

cudaError_t small_inverse_root(const InverseRoot& arguments, const RootScheduleTable& schedules,
                               cudaStream_t stream) {
  if (arguments.matrices == 0) return cudaSuccess;
  if (arguments.rule.n <= 16) return launch<16>(arguments, schedules, stream);
  if (arguments.rule.n <= 32) return launch<32>(arguments, schedules, stream);
  if (arguments.rule.n <= 64) return launch<64>(arguments, schedules, stream);
  return launch<128>(arguments, schedules, stream);
}

}  // namespace torchium::cuda_kernels
