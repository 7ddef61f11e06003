#include "cuda_kernels/eigenproblem/tridiagonal_eigenproblem.h"

#include <cfloat>

namespace torchium::cuda_kernels {
namespace {

constexpr int kMostSteps = 40 * kLargestLeaf;  // of QR; two or three for each eigenvalue are usual

struct Leaf {
  double d[kLargestLeaf], e[kLargestLeaf];
  double X[kLargestLeaf][kLargestLeaf + 1];  // eigenvectors in rows
};

__device__ __forceinline__ double warp_max(double x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmax(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

// Loads block `b` of T without the parts that the merges add: T[i, i] - |T[i, i + 1]| at both
// sides of each border. Padding: larger eigenvalues than those of T.
__device__ void load(const TridiagonalMatrices& T, const double* diagonal,
                     const double* off_diagonal, int b, Leaf& leaf) {
  const int lane = threadIdx.x;
  const int n = T.shape.n, m = T.shape.leaf;
  const int i = b * m + lane;
  const auto e = [&](int k) { return k >= 0 && k < n - 1 ? off_diagonal[k] : 0.0; };
  double padding = 0;
  if ((b + 1) * m > n) {
    double d_max = 0, e_max = 0;
    for (int k = lane; k < n; k += 32) {
      d_max = fmax(d_max, fabs(diagonal[k]));
      e_max = fmax(e_max, fabs(e(k)));
    }
    const double norm = warp_max(d_max) + 2 * warp_max(e_max);
    padding = norm > 0 ? 2 * norm : 1;
  }
  if (lane < m) {
    double d = i < n ? diagonal[i] : padding;
    if (lane == 0) d -= fabs(e(i - 1));
    if (lane == m - 1) d -= fabs(e(i));
    leaf.d[lane] = d;
    leaf.e[lane] = lane < m - 1 ? e(i) : 0;
    for (int r = 0; r < m; ++r) leaf.X[r][lane] = r == lane ? 1 : 0;
  }
  __syncwarp();
}

// One implicit QR step with Wilkinson's shift on the unreduced block [low, high] (Golub and Van
// Loan, Matrix Computations, 8.3.2). All lanes compute the same rotations, and lane c applies them
// to component c of the eigenvectors.
__device__ void qr_step(Leaf& leaf, int low, int high, int m) {
  const int lane = threadIdx.x;
  double* d = leaf.d;
  double* e = leaf.e;
  const double half = (d[high - 1] - d[high]) / 2;
  const double corner = e[high - 1];
  const double root = sqrt(half * half + corner * corner);
  const double shift = d[high] - corner * corner / (half + copysign(root, half));
  double x = d[low] - shift, z = e[low];
  for (int k = low; k < high; ++k) {
    const double square = x * x + z * z;
    const double inverse = rsqrt(square);
    const double c = square > 0 ? x * inverse : 1, s = square > 0 ? z * inverse : 0;
    const double dk = d[k], dn = d[k + 1], ek = e[k];
    const double below = k < high - 1 ? e[k + 1] : 0;
    __syncwarp();
    const double e_new = c * s * (dn - dk) + (c * c - s * s) * ek;
    if (lane == 0) {
      if (k > low) e[k - 1] = c * x + s * z;
      d[k] = c * c * dk + 2 * c * s * ek + s * s * dn;
      d[k + 1] = s * s * dk - 2 * c * s * ek + c * c * dn;
      e[k] = e_new;
      if (k < high - 1) e[k + 1] = c * below;
    }
    if (lane < m) {
      const double a = leaf.X[k][lane], b = leaf.X[k + 1][lane];
      leaf.X[k][lane] = c * a + s * b;
      leaf.X[k + 1][lane] = c * b - s * a;
    }
    __syncwarp();
    x = e_new;
    z = s * below;
  }
}

__device__ void diagonalise(Leaf& leaf, int m) {
  const int lane = threadIdx.x;
  const double norm = warp_max(lane < m ? fabs(leaf.d[lane]) + 2 * fabs(leaf.e[lane]) : 0);
  const double negligible = DBL_EPSILON / 4 * norm;
  int high = m - 1;
  for (int step = 0; high > 0 && step < kMostSteps; ++step) {
    while (high > 0 && fabs(leaf.e[high - 1]) <= negligible) --high;
    if (high == 0) break;
    int low = high - 1;
    while (low > 0 && fabs(leaf.e[low - 1]) > negligible) --low;
    qr_step(leaf, low, high, m);
  }
}

__global__ void __launch_bounds__(32)
    leaves_kernel(TridiagonalMatrices T, double* values, float* vectors) {
  __shared__ Leaf leaf;
  const int64_t matrix = blockIdx.y;
  const int b = blockIdx.x;
  const int lane = threadIdx.x;
  const int m = T.shape.leaf;
  load(T, T.diagonal + matrix * T.shape.n, T.off_diagonal + matrix * T.shape.n, b, leaf);
  diagonalise(leaf, m);
  if (lane >= m) return;
  const double d = leaf.d[lane];
  int place = 0;
  for (int i = 0; i < m; ++i) place += leaf.d[i] < d || (leaf.d[i] == d && i < lane);
  const int64_t first = matrix * T.shape.order() + b * m;
  values[first + place] = d;
  float* row = vectors + (first + place) * m;
  for (int i = 0; i < m; ++i) row[i] = static_cast<float>(leaf.X[lane][i]);
}

}  // namespace

TridiagonalShape tridiagonal_shape(int n) {
  TridiagonalShape shape{n, n, 0};
  while (shape.leaf > kLargestLeaf) {
    ++shape.levels;
    shape.leaf = (n + (1 << shape.levels) - 1) >> shape.levels;
  }
  return shape;
}

cudaError_t solve_leaves(const TridiagonalMatrices& T, double* values, float* vectors,
                         cudaStream_t stream) {
  leaves_kernel<<<dim3(1 << T.shape.levels, T.count), 32, 0, stream>>>(T, values, vectors);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
