#include "cuda_kernels/common/triangle.cuh"
#include "cuda_kernels/inverse_root/spd_inverse.h"

#include <cfloat>
#include <cmath>
#include <utility>

namespace torchium::cuda_kernels {
namespace {

// A block inverts one matrix of up to kOrder rows. Each thread holds one square tile on or below
// the diagonal in registers.
template <int tile, int tiles_across>
struct Layout {
  static constexpr int kTile = tile;
  static constexpr int kOrder = tile * tiles_across;
  static constexpr int kTiles = tiles_across * (tiles_across + 1) / 2;
  static constexpr int kThreads = (kTiles + 31) / 32 * 32;
};

// The sweep operator (Goodnight 1979, "A tutorial on the SWEEP operator") by all pivots turns A
// into -A^-1. The pivots are those of L D L^T.
template <typename L>
class Sweep {
  static constexpr int T = L::kTile;

 public:
  // columns: two buffers of a column.
  __device__ Sweep(const SpdInverse& arguments, float (*columns)[L::kOrder])
      : arguments_(arguments),
        columns_(columns),
        place_(static_cast<int>(threadIdx.x)),
        is_active_(threadIdx.x < L::kTiles) {}

  __device__ void run(int64_t matrix) {
    const int n = arguments_.n;
    const float largest = load(arguments_.A + matrix * n * n);
    const bool is_finite = largest <= FLT_MAX;
    const double top = fmax(double{largest}, arguments_.damping);
    int exponent = 0;
    frexp(is_finite ? top : 0.0, &exponent);
    const double unit = is_finite ? ldexp(1.0, -exponent) : NAN;
    const bool is_regular =
        is_finite && top > 0 && sweep(unit, top) && largest_entry() * unit <= arguments_.largest;
    if (threadIdx.x == 0) arguments_.is_singular[matrix] = is_finite && !is_regular;
    if (is_finite && !is_regular) return;
    write(arguments_.inverse + matrix * n * n, unit);
  }

 private:
  // body(i, j, entry) for the entries of the tile.
  template <typename Body>
  __device__ void for_each_entry(const Body& body) {
    if (!is_active_) return;
#pragma unroll
    for (int r = 0; r < T; ++r) {
#pragma unroll
      for (int c = 0; c < T; ++c) body(place_.row * T + r, place_.column * T + c, a_[r][c]);
    }
  }

  // The symmetric part of A, as a / 2 + b / 2, because a + b may overflow; the identity beyond.
  // Returns the largest magnitude.
  __device__ float load(const float* A) {
    const int n = arguments_.n;
    for_each_entry([&](int i, int j, float& a) {
      a = i < n && j < n ? 0.5f * A[i * n + j] + 0.5f * A[j * n + i] : i == j ? 1.0f : 0.0f;
    });
    return largest_entry();
  }

  // The largest magnitude, or NaN, in all threads.
  __device__ float largest_entry() {
    const int n = arguments_.n;
    float largest = 0;
    for_each_entry([&](int i, int j, float& a) {
      if (i < n && j < n && !(fabsf(a) <= largest || largest != largest)) largest = fabsf(a);
    });
    const bool is_nan = __syncthreads_or(largest != largest);
    // Magnitudes are ordered as their bits.
    int* shared = reinterpret_cast<int*>(columns_[0]);
    if (threadIdx.x == 0) *shared = 0;
    __syncthreads();
    const unsigned of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
    if (threadIdx.x % 32 == 0) atomicMax(shared, static_cast<int>(of_warp));
    __syncthreads();
    largest = is_nan ? NAN : __int_as_float(*shared);
    __syncthreads();
    return largest;
  }

  // Of unit (A + damping I). Returns false at the first pivot that is too small.
  __device__ bool sweep(double unit, double top) {
    const int n = arguments_.n;
    for_each_entry([&](int i, int j, float& a) {
      if (i < n && j < n) {
        a = static_cast<float>((double{a} + (i == j ? arguments_.damping : 0.0)) * unit);
      }
    });
    const auto least =
        static_cast<float>(arguments_.noise * (top + fmin(top, arguments_.damping)) * unit);
    put_column<0>(0, columns_[0]);
    __syncthreads();
    for (int block = 0; block * T < n; ++block) {
      if (!sweep_block(block, least, std::make_integer_sequence<int, T>())) return false;
    }
    return true;
  }

  template <int... k>
  __device__ bool sweep_block(int block, float least, std::integer_sequence<int, k...>) {
    return (sweep_pivot<k>(block, least) && ...);
  }

  // By pivot k of the block's T ones.
  template <int k>
  __device__ bool sweep_pivot(int block, float least) {
    static_assert(T % 2 == 0);
    const float* column = columns_[k % 2];
    const float pivot = column[block * T + k];
    if (!(pivot > least)) return false;  // in all threads
    if (is_active_) update<k>(block, column, 1 / pivot);
    constexpr int kNext = (k + 1) % T;
    put_column<kNext>(block + (kNext == 0), columns_[kNext % 2]);
    __syncthreads();
    return true;
  }

  template <int k>
  __device__ void update(int block, const float* column, float reciprocal) {
    float of_rows[T], of_columns[T];
#pragma unroll
    for (int i = 0; i < T; ++i) {
      of_rows[i] = column[place_.row * T + i] * reciprocal;
      of_columns[i] = column[place_.column * T + i];
    }
#pragma unroll
    for (int r = 0; r < T; ++r) {
#pragma unroll
      for (int c = 0; c < T; ++c) a_[r][c] = fmaf(-of_rows[r], of_columns[c], a_[r][c]);
    }
    if (place_.column == block) {
#pragma unroll
      for (int r = 0; r < T; ++r) a_[r][k] = of_rows[r];
    }
    if (place_.row == block) {
#pragma unroll
      for (int c = 0; c < T; ++c) a_[k][c] = of_columns[c] * reciprocal;
    }
    if (place_.row == block && place_.column == block) a_[k][k] = -reciprocal;
  }

  // Column k of a block of T, by the tiles that hold it or its mirror image.
  template <int k>
  __device__ void put_column(int block, float* column) const {
    if (!is_active_) return;
    if (place_.column == block) {
#pragma unroll
      for (int r = 0; r < T; ++r) column[place_.row * T + r] = a_[r][k];
    } else if (place_.row == block) {
#pragma unroll
      for (int c = 0; c < T; ++c) column[place_.column * T + c] = a_[k][c];
    }
  }

  // The negative of the tiles times a number, and their mirror images.
  __device__ void write(float* inverse, double factor) {
    const int n = arguments_.n;
    for_each_entry([&](int i, int j, float& a) {
      if (i >= n || j > i) return;
      inverse[i * n + j] = inverse[j * n + i] = static_cast<float>(-factor * a);
    });
  }

  const SpdInverse& arguments_;
  float (*const columns_)[L::kOrder];
  const TriangleTile place_;
  const bool is_active_;
  float a_[T][T];
};

template <typename L>
__global__ void __launch_bounds__(L::kThreads)
    spd_inverse_kernel(const __grid_constant__ SpdInverse arguments) {
  __shared__ __align__(16) float columns[2][L::kOrder];
  Sweep<L>(arguments, columns).run(blockIdx.x);
}

template <typename L>
cudaError_t launch(const SpdInverse& arguments, cudaStream_t stream) {
  spd_inverse_kernel<L>
      <<<static_cast<unsigned>(arguments.matrices), L::kThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace

cudaError_t spd_inverse(const SpdInverse& arguments, cudaStream_t stream) {
  if (arguments.matrices == 0) return cudaSuccess;
  if (arguments.n <= 32) return launch<Layout<4, 8>>(arguments, stream);
  if (arguments.n <= 64) return launch<Layout<4, 16>>(arguments, stream);
  if (arguments.n <= 128) return launch<Layout<8, 16>>(arguments, stream);
  if (arguments.n <= 192) return launch<Layout<8, 24>>(arguments, stream);
  return launch<Layout<8, 32>>(arguments, stream);
}

}  // namespace torchium::cuda_kernels
