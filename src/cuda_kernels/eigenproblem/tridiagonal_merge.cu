#include "cuda_kernels/common/warp_sums.cuh"
#include "cuda_kernels/eigenproblem/tridiagonal_eigenproblem.h"

#include <cfloat>

namespace torchium::cuda_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRowWarps = 4;  // of vectors_kernel
// Changes of the matrix below this times its norm are taken for zero: an eighth of float32's
// epsilon, so that they add little to the rounding errors of the vectors.
constexpr double kDeflation = FLT_EPSILON / 8;
constexpr double kRootPrecision = 4 * DBL_EPSILON;
constexpr int kMostIterations = 100;  // of a root; about ten are usual

// A block of a merge: its arrays begin at `first`.
struct Block {
  int64_t matrix, index, first;
  int poles;

  __device__ Block(const TridiagonalMerge& merge, int block)
      : matrix(block / (merge.T.shape.order() / merge.size)),
        index(block),
        first(int64_t{block} * merge.size),
        poles(0) {}
};

// The entry of T that the block's halves are torn at.
__device__ double border(const TridiagonalMerge& merge, const Block& block) {
  const int n = merge.T.shape.n;
  const int row =
      static_cast<int>(block.first - block.matrix * merge.T.shape.order()) + merge.size / 2 - 1;
  return row < n - 1 ? merge.T.off_diagonal[block.matrix * n + row] : 0;
}

// The number of the entries of ascending `values` below `x`, or not above it.
__device__ int count_below(const double* values, int count, double x, bool or_equal) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (values[middle] < x || (or_equal && values[middle] == x)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

struct Sorted {
  double d[kLargestTridiagonal], z[kLargestTridiagonal], halves[kLargestTridiagonal];
  int source[kLargestTridiagonal];
  int order[kLargestTridiagonal];  // poles from the front, others from the back
};

// Divides the eigenvalues d of the halves into the poles of the merge and those that it leaves as
// they are: where rho z_j is negligible, or can be made zero by a rotation with the pole before it
// that adds a negligible entry d_j - d_i to the matrix (LAPACK's slaed2). One thread does it: what
// is done with a pole depends on those before it.
__device__ void deflate(const TridiagonalMerge& merge, const Block& block, double rho,
                        Sorted& sorted) {
  const int m = merge.size;
  const double norm = fmax(fmax(fabs(sorted.d[0]), fabs(sorted.d[m - 1])), rho);
  const double negligible = kDeflation * norm;
  int poles = 0, others = 0, rotations = 0, last = -1;
  for (int j = 0; j < m; ++j) {
    if (rho * fabs(sorted.z[j]) <= negligible) {
      sorted.order[m - ++others] = j;
      continue;
    }
    if (last >= 0) {
      const double z_i = sorted.z[last], z_j = sorted.z[j];
      const double d_i = sorted.d[last], d_j = sorted.d[j];
      if ((d_j - d_i) * fabs(z_i * z_j) <= negligible * (z_i * z_i + z_j * z_j)) {
        const double length = hypot(z_i, z_j);
        const double c = z_j / length, s = z_i / length;
        sorted.z[j] = length;
        sorted.d[last] = d_i * c * c + d_j * s * s;
        sorted.d[j] = d_i * s * s + d_j * c * c;
        merge.rotated[block.first + rotations] = {sorted.source[last], sorted.source[j]};
        merge.rotation[block.first + rotations] = {c, s};
        ++rotations;
        sorted.order[m - ++others] = last;
      } else {
        sorted.order[poles++] = last;
      }
    }
    last = j;
  }
  if (last >= 0) sorted.order[poles++] = last;
  merge.poles_of_block[block.index] = poles;
  merge.rotations_of_block[block.index] = rotations;
}

__global__ void __launch_bounds__(kThreads) deflate_kernel(TridiagonalMerge merge) {
  extern __shared__ __align__(16) unsigned char memory[];
  Sorted& sorted = *reinterpret_cast<Sorted*>(memory);
  const Block block(merge, blockIdx.x);
  const int m = merge.size, h = m / 2;
  const double e = border(merge, block);
  for (int i = threadIdx.x; i < m; i += kThreads) {
    sorted.halves[i] = merge.values[block.first + i];
    sorted.source[i] = i;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < m; i += kThreads) {
    const bool is_first = i < h;
    const double d = sorted.halves[i];
    const int place = is_first ? i + count_below(sorted.halves + h, h, d, false)
                               : i - h + count_below(sorted.halves, h, d, true);
    // u is 1 at the end of the first half, and the sign of e at the start of the second.
    const float* row = merge.vectors + (block.first + i) * h;
    const double z = is_first ? row[h - 1] : copysign(1.0, e) * row[0];
    sorted.d[place] = d;
    sorted.z[place] = z;
    sorted.source[place] = i;
  }
  __syncthreads();
  if (threadIdx.x == 0) deflate(merge, block, fabs(e), sorted);
  __syncthreads();
  for (int i = threadIdx.x; i < m; i += kThreads) {
    const int from = sorted.order[i];
    merge.pole[block.first + i] = sorted.d[from];
    merge.z[block.first + i] = sorted.z[from];
    merge.source[block.first + i] = sorted.source[from];
  }
}

// f(mu) = 1 / rho + sum_j z_j^2 / (d_j - d_origin - mu), a root of which is an eigenvalue, split
// at the root; its derivatives; and the sum of the absolute values.
struct Secular {
  double f, slope_before, slope_after, scale;
};

__device__ Secular secular(const double* d, const double* z, int poles, double rho, int i,
                           double origin, double mu) {
  double before = 0, after = 0, slope_before = 0, slope_after = 0;
  for (int j = threadIdx.x % 32; j < poles; j += 32) {
    const double inverse = 1 / (d[j] - origin - mu);
    const double term = z[j] * z[j] * inverse;
    (j <= i ? before : after) += term;
    (j <= i ? slope_before : slope_after) += term * inverse;
  }
  before = warp_sum(before);
  after = warp_sum(after);
  return {1 / rho + before + after, warp_sum(slope_before), warp_sum(slope_after),
          1 / rho + fabs(before) + fabs(after)};
}

// The step to the root of c + p / (a - step) + q / (b - step), where a and b are the distances of
// the poles around it and p, q and c fit the two slopes and the value (Li 1993, "Solving secular
// equations stably and efficiently", the middle way).
__device__ double middle_way(const Secular& at, double a, double b) {
  const double c = at.f - a * at.slope_before - b * at.slope_after;
  const double linear = (a + b) * at.f - a * b * (at.slope_before + at.slope_after);
  const double constant = a * b * at.f;
  const double root = sqrt(fmax(linear * linear - 4 * constant * c, 0.0));
  return linear <= 0 ? (linear - root) / (2 * c) : 2 * constant / (linear + root);
}

struct Root {
  int origin;
  double shift;
};

// Root i, between poles i and i + 1, or above the last pole by at most rho |z|^2. As a difference
// from the nearest pole it has a small relative error. Every fourth step bisects.
__device__ Root find_root(const double* d, const double* z, int poles, double rho, int i) {
  const bool is_last = i + 1 == poles;
  double square = 0;
  if (is_last) {
    for (int j = threadIdx.x % 32; j < poles; j += 32) square = fma(z[j], z[j], square);
    square = warp_sum(square);
  }
  const double gap = is_last ? rho * square : d[i + 1] - d[i];
  const bool is_low = secular(d, z, poles, rho, i, d[i], gap / 2).f >= 0;
  const int origin = is_low || is_last ? i : i + 1;
  double low = is_low ? 0 : is_last ? gap / 2 : -gap / 2;
  double high = is_low ? gap / 2 : is_last ? gap : 0;
  const double below = d[i] - d[origin], above = is_last ? gap : d[i + 1] - d[origin];
  double mu = (low + high) / 2;
  for (int iteration = 0; iteration < kMostIterations; ++iteration) {
    const Secular at = secular(d, z, poles, rho, i, d[origin], mu);
    (at.f >= 0 ? high : low) = mu;
    if (fabs(at.f) <= kRootPrecision * at.scale ||
        high - low <= kRootPrecision * fmax(fabs(low), fabs(high))) {
      break;
    }
    double next = mu + middle_way(at, below - mu, above - mu);
    if (!(next > low && next < high) || iteration % 4 == 3) {
      // By orders of magnitude where these are many.
      const bool is_wide = low > 0 ? high > 4 * low : high < 0 && low < 4 * high;
      next = is_wide ? copysign(sqrt(low * high), low + high) : (low + high) / 2;
    }
    mu = next;
  }
  return {origin, mu};
}

// A warp for each root.
__global__ void __launch_bounds__(kThreads) roots_kernel(TridiagonalMerge merge) {
  const Block block(merge, blockIdx.y);
  const int poles = merge.poles_of_block[block.index];
  const int i = blockIdx.x * kWarps + threadIdx.x / 32;
  if (i >= poles) return;
  const Root root = find_root(merge.pole + block.first, merge.z + block.first, poles,
                              fabs(border(merge, block)), i);
  if (threadIdx.x % 32 == 0) {
    merge.origin[block.first + i] = root.origin;
    merge.shift[block.first + i] = root.shift;
  }
}

// d_j - lambda_i
__device__ __forceinline__ double distance(const double* d, const int* origin, const double* shift,
                                           int j, int i) {
  return d[j] - d[origin[i]] - shift[i];
}

// |z_j| of the matrix that has the computed roots exactly, so that its eigenvectors are orthogonal
// (Gu and Eisenstat 1995), up to a factor that all j share:
//   z_j^2 = (lambda_j - d_j) prod_{i != j} (lambda_i - d_j) / (d_i - d_j).
__device__ double consistent_z(const double* d, const int* origin, const double* shift, int poles,
                               int j) {
  double product = 1;
  for (int i = threadIdx.x % 32; i < poles; i += 32) {
    const double each = -distance(d, origin, shift, j, i);
    product *= i == j ? each : each / (d[i] - d[j]);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    product *= __shfl_xor_sync(0xffffffffu, product, offset);
  }
  return sqrt(fmax(product, 0.0));
}

__global__ void __launch_bounds__(kThreads) consistent_z_kernel(TridiagonalMerge merge) {
  const Block block(merge, blockIdx.y);
  const int poles = merge.poles_of_block[block.index];
  const int j = blockIdx.x * kWarps + threadIdx.x / 32;
  if (j >= poles) return;
  const double z = consistent_z(merge.pole + block.first, merge.origin + block.first,
                                merge.shift + block.first, poles, j);
  if (threadIdx.x % 32 == 0) merge.z[block.first + j] = copysign(z, merge.z[block.first + j]);
}

// Row i of S, by a warp: the eigenvector of root i, v_j = z_j / (d_j - lambda_i), or the unit
// vector of an eigenvalue that the merge leaves as it is; in terms of the rows before the
// rotations. These can be a long chain on one number, hence float64.
__global__ void __launch_bounds__(kRowWarps * 32) vectors_kernel(TridiagonalMerge merge) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int m = merge.size;
  double* row = reinterpret_cast<double*>(memory) + threadIdx.x / 32 * m;
  const Block block(merge, blockIdx.y);
  const int poles = merge.poles_of_block[block.index];
  const int i = blockIdx.x * kRowWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (i >= m) return;
  const double* d = merge.pole + block.first;
  const double* z = merge.z + block.first;
  const int* origin = merge.origin + block.first;
  const double* shift = merge.shift + block.first;
  const int* source = merge.source + block.first;

  const auto value = [&](int k) { return k < poles ? d[origin[k]] + shift[k] : d[k]; };
  const double own = value(i);
  int place = 0;
  for (int k = lane; k < m; k += 32) {
    const double other = value(k);
    place += other < own || (other == own && k < i);
  }
  place = __reduce_add_sync(0xffffffffu, place);

  for (int j = lane; j < m; j += 32) row[j] = 0;
  __syncwarp();
  if (i < poles) {
    double square = 0;
    for (int j = lane; j < poles; j += 32) {
      const double each = z[j] / distance(d, origin, shift, j, i);
      square = fma(each, each, square);
    }
    const double scale = rsqrt(warp_sum(square));
    for (int j = lane; j < poles; j += 32) {
      row[source[j]] = z[j] / distance(d, origin, shift, j, i) * scale;
    }
  } else if (lane == 0) {
    row[source[i]] = 1;
  }
  __syncwarp();
  if (lane == 0) {
    for (int k = merge.rotations_of_block[block.index] - 1; k >= 0; --k) {
      const int2 pair = merge.rotated[block.first + k];
      const double2 rotation = merge.rotation[block.first + k];
      const double a = row[pair.x], b = row[pair.y];
      row[pair.x] = rotation.x * a + rotation.y * b;
      row[pair.y] = rotation.x * b - rotation.y * a;
    }
  }
  __syncwarp();
  float* to = merge.S + (block.first + place) * m;
  for (int j = lane; j < m; j += 32) to[j] = static_cast<float>(row[j]);
  if (lane == 0) merge.values[block.first + place] = own;
}

}  // namespace

cudaError_t merge_tridiagonal(const TridiagonalMerge& merge, cudaStream_t stream) {
  const int blocks = merge.T.count * (merge.T.shape.order() / merge.size);
  const dim3 by_warps((merge.size + kWarps - 1) / kWarps, blocks);
  deflate_kernel<<<blocks, kThreads, sizeof(Sorted), stream>>>(merge);
  roots_kernel<<<by_warps, kThreads, 0, stream>>>(merge);
  consistent_z_kernel<<<by_warps, kThreads, 0, stream>>>(merge);
  const dim3 by_rows((merge.size + kRowWarps - 1) / kRowWarps, blocks);
  const size_t rows = kRowWarps * merge.size * sizeof(double);
  vectors_kernel<<<by_rows, kRowWarps * 32, rows, stream>>>(merge);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
