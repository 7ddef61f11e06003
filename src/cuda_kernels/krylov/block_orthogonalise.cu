#include "cuda_kernels/common/pipeline.cuh"
#include "cuda_kernels/common/warp_sums.cuh"
#include "cuda_kernels/krylov/block_orthogonalise.h"

#include <algorithm>
#include <cfloat>
#include <type_traits>

namespace torchium::cuda_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRowsAtOnce = 2;      // of row_products_kernel, per thread block
constexpr int kLeastSegment = 512;  // columns of a thread block there
constexpr int kMostBlocks = 264;    // thread blocks there that run at the same time: two per
                                    // processor of an H100
constexpr int kColumns = 64;        // of subtract_kernel, per thread block
constexpr int kGroups = kThreads / kColumns;
constexpr int kCoefficientRows = 128;
constexpr int kRecombineThreads = 256;

// Each kernel here is short and reads what the one before wrote: from Hopper on it is launched
// while that one runs.
__device__ void start_after_previous() {
#if __CUDA_ARCH__ >= 900
  wait_for_prerequisites();
  launch_dependents();
#endif
}

class Launcher {
 public:
  explicit Launcher(cudaStream_t stream) {
    int device = 0, major = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    overlap_.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap_.val.programmaticStreamSerializationAllowed = 1;
    config_.stream = stream;
    config_.attrs = &overlap_;
    config_.numAttrs = major >= 9 ? 1 : 0;
  }
  Launcher(const Launcher&) = delete;

  template <typename... Parameters, typename... Arguments>
  void operator()(void (*kernel)(Parameters...), dim3 grid, int threads, Arguments... arguments) {
    config_.gridDim = grid;
    config_.blockDim = threads;
    const cudaError_t error = cudaLaunchKernelEx(&config_, kernel, Parameters(arguments)...);
    if (error_ == cudaSuccess) error_ = error;
  }
  cudaError_t error() const { return error_; }

 private:
  cudaLaunchAttribute overlap_{};
  cudaLaunchConfig_t config_{};
  cudaError_t error_ = cudaSuccess;
};

// partial[s, i, k] = sum of rows[i, c] block[k, c] over the columns c of segment s.
template <int K>
__global__ void __launch_bounds__(kThreads)
    row_products_kernel(const float* rows, int count, const float* block, int64_t n,
                        int64_t segment, double* partial) {
  start_after_previous();
  const int first = blockIdx.x * kRowsAtOnce;
  const int64_t begin = blockIdx.y * segment;
  const int64_t end = begin + segment < n ? begin + segment : n;
  const float* row[kRowsAtOnce];
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) row[r] = rows + int64_t{min(first + r, count - 1)} * n;

  double sum[kRowsAtOnce * K] = {};
#pragma unroll 2
  for (int64_t c = begin + threadIdx.x; c < end; c += kThreads) {
    double x[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) x[r] = row[r][c];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const double w = block[k * n + c];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) sum[r * K + k] = fma(x[r], w, sum[r * K + k]);
    }
  }

  constexpr int kLanes = 32 / (kRowsAtOnce * K);  // that have the same sum
  __shared__ double parts[kWarps][kRowsAtOnce * K];
  const int lane = threadIdx.x % 32;
  const double of_warp = warp_sums<kRowsAtOnce * K>(sum, lane);
  if (lane % kLanes == 0) parts[threadIdx.x / 32][lane / kLanes] = of_warp;
  __syncthreads();
  const int i = threadIdx.x;
  if (i < kRowsAtOnce * K && first + i / K < count) {
    double total = 0;
    for (int w = 0; w < kWarps; ++w) total += parts[w][i];
    partial[(int64_t{blockIdx.y} * count + first + i / K) * K + i % K] = total;
  }
}

// sums[i, k] = sum_s partial[s, i, k] for all i < total; block[k] -= sum_i sums[i, k] rows[i] for
// i < count.
template <int K>
__global__ void __launch_bounds__(kThreads)
    subtract_kernel(const float* rows, int count, int total, const double* partial, int segments,
                    float* block, int64_t n, double* sums) {
  start_after_previous();
  __shared__ double coefficient[kCoefficientRows][K];
  __shared__ double taken[kGroups][K][kColumns];
  const int column = threadIdx.x % kColumns;
  const int group = threadIdx.x / kColumns;
  const int64_t c = int64_t{blockIdx.x} * kColumns + column;

  double sum[K] = {};
  for (int first = 0; first < total; first += kCoefficientRows) {
    const int here = min(kCoefficientRows, total - first);
    __syncthreads();
    for (int i = threadIdx.x; i < here * K; i += kThreads) {
      double each = 0;
#pragma unroll 8
      for (int s = 0; s < segments; ++s) each += partial[(int64_t{s} * total + first) * K + i];
      coefficient[i / K][i % K] = each;
      if (blockIdx.x == 0) sums[first * K + i] = each;
    }
    __syncthreads();
    const int subtracted = c < n ? min(here, count - first) : 0;
#pragma unroll 4
    for (int i = group; i < subtracted; i += kGroups) {
      const double v = rows[int64_t{first + i} * n + c];
#pragma unroll
      for (int k = 0; k < K; ++k) sum[k] = fma(coefficient[i][k], v, sum[k]);
    }
  }

#pragma unroll
  for (int k = 0; k < K; ++k) taken[group][k][column] = sum[k];
  __syncthreads();
  if (c >= n) return;
  for (int k = group; k < K; k += kGroups) {
    double all = 0;
    for (int g = 0; g < kGroups; ++g) all += taken[g][k][column];
    block[k * n + c] = static_cast<float>(block[k * n + c] - all);
  }
}

// What is left of row p is a rounding error if it is not above factor * sqrt(squares[p, p]).
struct LeastLengths {
  double factor;
  const double* squares;  // [.., 2 block]; null: 1
};

// Where the results go: C1 and C2 are the sums of the two projections, R1 the factor of the first.
struct Coefficients {
  const double* C1;  // [known, 2 block]
  const double* C2;
  double* R1;          // [block, block]
  double* projection;  // as in BlockOrthogonalise
  int64_t row_stride;
  int known;
};

template <int B>
struct GramSchmidt {
  double G[2 * B][2 * B];  // scalar products of the rows
  double T[2 * B][2 * B];  // the rows, as combinations of the former rows
  double Q[B][2 * B];      // the orthonormal rows, likewise
  double R[B][B];
};

// The lane of the largest value among B neighbours; of equal ones the first.
template <int B>
__device__ int largest_lane(double value, int lane) {
#pragma unroll
  for (int offset = B / 2; offset > 0; offset /= 2) {
    const double other = __shfl_xor_sync(0xffffffffu, value, offset);
    const int of_other = __shfl_xor_sync(0xffffffffu, lane, offset);
    if (other > value || (other == value && of_other < lane)) {
      value = other;
      lane = of_other;
    }
  }
  return lane;
}

template <int K>
__device__ double element(const double (&x)[K], int index) {
  double found = x[0];
#pragma unroll
  for (int i = 1; i < K; ++i) found = i == index ? x[i] : found;
  return found;
}

// Gram-Schmidt with pivots, by scalar products alone, of the first B rows; the others are random
// and lose their part in these. In float64, because a small remainder is a difference of products.
// The pivot is the largest remainder: if even that is noise, so are the others, and their
// coefficients. By one warp; lane l has column l of G and T in registers.
template <int B>
__device__ void orthonormalise(GramSchmidt<B>& s, const LeastLengths& least, int lane) {
  constexpr int K = 2 * B;
  constexpr unsigned kAll = 0xffffffffu;
  const int column = lane % K;
  double G[K], T[K];
#pragma unroll
  for (int i = 0; i < K; ++i) {
    G[i] = s.G[i][column];
    T[i] = s.T[i][column];
  }
  double square = s.G[column][column];  // G[l][l]
  __syncwarp();
  const double unit = least.squares == nullptr ? 1.0 : least.squares[column * K + column];
  bool used = false;
  for (int j = 0; j < B; ++j) {
    const int largest = largest_lane<B>(used ? -DBL_MAX : square, column);
    const int p = __shfl_sync(kAll, largest, 0);
    const int spare = __shfl_sync(kAll, largest, B);
    const double left = __shfl_sync(kAll, square, p);
    const bool is_left = left > least.factor * least.factor * __shfl_sync(kAll, unit, p);
    const int from = is_left ? p : spare;
    const double length = sqrt(fmax(__shfl_sync(kAll, square, from), DBL_MIN));
    const double inverse = 1 / length;
    const double r = inverse * element(G, from);
    const double q = inverse * element(T, from);
    if (lane < K) s.Q[j][lane] = q;
    if (lane < B) s.R[j][lane] = lane == p ? (is_left ? length : 0.0) : used ? 0.0 : r;
    used = used || column == p;
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const double of_row = __shfl_sync(kAll, r, i);
      G[i] = i == p || column == p ? 0.0 : G[i] - of_row * r;
      T[i] -= of_row * q;
    }
    square = column == p ? 0.0 : square - r * r;
  }
#pragma unroll
  for (int i = 0; i < K; ++i) {
    if (lane < K) s.T[i][lane] = T[i];
  }
}

// The columns C1 + C2 R1 above R2 R1 of the projection.
template <int B>
__device__ void write_projection(const Coefficients& to, const double (&R2)[B][B]) {
  constexpr int K = 2 * B;
  for (int i = threadIdx.x; i < (to.known + B) * B; i += kRecombineThreads) {
    const int row = i / B, column = i % B;
    double sum = row < to.known ? to.C1[row * K + column] : 0.0;
    for (int m = 0; m < B; ++m) {
      const double factor = row < to.known ? to.C2[row * K + m] : R2[row - to.known][m];
      sum = fma(factor, to.R1[m * B + column], sum);
    }
    to.projection[row * to.row_stride + column] = sum;
  }
}

// Makes the first B rows of `block` orthonormal, from the scalar products of all.
template <int B, bool is_last>
__global__ void __launch_bounds__(kRecombineThreads)
    recombine_kernel(float* block, int64_t n, const double* partial, int segments,
                     LeastLengths least, Coefficients to) {
  start_after_previous();
  constexpr int K = 2 * B;
  __shared__ GramSchmidt<B> s;
  for (int i = threadIdx.x; i < K * K; i += kRecombineThreads) {
    double sum = 0;
#pragma unroll 32
    for (int each = 0; each < segments; ++each) sum += partial[each * K * K + i];
    s.G[i / K][i % K] = sum;
    s.T[i / K][i % K] = i / K == i % K ? 1.0 : 0.0;
  }
  __syncthreads();
  if (threadIdx.x < 32) orthonormalise<B>(s, least, threadIdx.x);
  __syncthreads();
  if (blockIdx.x == 0) {
    if (!is_last) {
      for (int i = threadIdx.x; i < B * B; i += kRecombineThreads) to.R1[i] = s.R[i / B][i % B];
    } else if (to.projection != nullptr) {
      write_projection<B>(to, s.R);
    }
  }

  const int64_t c = int64_t{blockIdx.x} * kRecombineThreads + threadIdx.x;
  if (c >= n) return;
  double w[K];
#pragma unroll
  for (int k = 0; k < K; ++k) w[k] = block[k * n + c];
  for (int j = 0; j < (is_last ? B : K); ++j) {
    const double* of_row = j < B ? s.Q[j] : s.T[j];
    double sum = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) sum = fma(of_row[k], w[k], sum);
    block[j * n + c] = static_cast<float>(sum);
  }
}

int segments_of(int rows, int64_t n) {
  const int64_t row_blocks = std::max(1, (rows + kRowsAtOnce - 1) / kRowsAtOnce);
  const int64_t wanted = kMostBlocks / row_blocks;
  const int64_t most = (n + kLeastSegment - 1) / kLeastSegment;
  return static_cast<int>(std::max<int64_t>(1, std::min(wanted, most)));
}

unsigned blocks_of(int64_t n, int64_t each) { return static_cast<unsigned>((n + each - 1) / each); }

template <int B>
class Orthogonaliser {
 public:
  Orthogonaliser(const BlockOrthogonalise& arguments, cudaStream_t stream)
      : a_(arguments), launch_(stream), block_(a_.rows + a_.known * a_.n) {
    partial_ = a_.workspace;
    gram_ = partial_ + partial_size(a_.known, a_.n);
    C1_ = gram_ + gram_size(a_.n);
    C2_ = C1_ + (a_.known + B) * K;
    R1_ = C2_ + a_.known * K;
  }

  static int64_t workspace(int known, int64_t n) {
    return partial_size(known, n) + gram_size(n) + (2 * int64_t{known} + B) * K + B * B;
  }

  cudaError_t run() {
    const Coefficients to{C1_, C2_, R1_, a_.projection, a_.row_stride, a_.known};
    project(a_.known + B, C1_);
    recombine<false>({a_.epsilon, C1_ + a_.known * K}, to);
    if (a_.known > 0) project(a_.known, C2_);
    recombine<true>({a_.noise, nullptr}, to);
    return launch_.error();
  }

 private:
  static constexpr int K = 2 * B;

  static int64_t partial_size(int known, int64_t n) {
    // The second projection has fewer rows, and perhaps more segments.
    return std::max(int64_t{segments_of(known + B, n)} * (known + B),
                    int64_t{segments_of(known, n)} * known) *
           K;
  }
  static int64_t gram_size(int64_t n) { return int64_t{segments_of(K, n)} * K * K; }

  int products(const float* rows, int count, double* partial) {
    const int segments = segments_of(count, a_.n);
    const int64_t columns = (a_.n + segments - 1) / segments;
    const dim3 grid((count + kRowsAtOnce - 1) / kRowsAtOnce, segments);
    launch_(row_products_kernel<K>, grid, kThreads, rows, count, block_, a_.n, columns, partial);
    return segments;
  }

  // Subtracts from all 2 B rows of the block what they have in V. `sums`: the products of the first
  // `count` rows, V and perhaps some of the block, with the rows of the block.
  void project(int count, double* sums) {
    const int segments = products(a_.rows, count, partial_);
    launch_(subtract_kernel<K>, blocks_of(a_.n, kColumns), kThreads, a_.rows, a_.known, count,
            partial_, segments, block_, a_.n, sums);
  }

  template <bool is_last>
  void recombine(const LeastLengths& least, const Coefficients& to) {
    const int segments = products(block_, K, gram_);
    launch_(recombine_kernel<B, is_last>, blocks_of(a_.n, kRecombineThreads), kRecombineThreads,
            block_, a_.n, gram_, segments, least, to);
  }

  BlockOrthogonalise a_;
  Launcher launch_;
  float* block_;
  double *partial_, *gram_, *C1_, *C2_, *R1_;
};

// function(B) for the block size B, as a type.
template <typename Function>
auto with_block(int block, const Function& function) {
  switch (block) {
    case 1:
      return function(std::integral_constant<int, 1>());
    case 2:
      return function(std::integral_constant<int, 2>());
    case 4:
      return function(std::integral_constant<int, 4>());
    default:
      return function(std::integral_constant<int, 8>());
  }
}

}  // namespace

int64_t block_orthogonalise_workspace(int known, int block, int64_t n) {
  return with_block(block, [&](auto B) { return Orthogonaliser<B>::workspace(known, n); });
}

cudaError_t block_orthogonalise(const BlockOrthogonalise& arguments, cudaStream_t stream) {
  return with_block(arguments.block,
                    [&](auto B) { return Orthogonaliser<B>(arguments, stream).run(); });
}

}  // namespace torchium::cuda_kernels
