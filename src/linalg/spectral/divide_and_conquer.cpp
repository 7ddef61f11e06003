#include "linalg/spectral/divide_and_conquer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <utility>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/eigenproblem/tridiagonal_eigenproblem.h"
#include "cuda_kernels/eigenproblem/tridiagonalise.h"
#include "linalg/products/batched_products.h"
#include "support/device_code.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::linalg::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

constexpr int64_t kSmallest = 65;       // cuSOLVER is faster below
constexpr int64_t kPanel = 128;         // reflectors that are applied together
constexpr int64_t kMostBlocks = 65535;  // of a grid's second dimension
// Of the matrices that are solved at once: 40 bytes of workspace each, 640 MiB.
constexpr int64_t kMostElements = int64_t{1} << 24;

// A = Q T Q^T.
struct Tridiagonal {
  at::Tensor diagonal, off_diagonal;  // [N, n] float64
  at::Tensor reflectors;              // [N, panels * kPanel, n]
};

Tridiagonal tridiagonal_form(const at::Tensor& S) {
  const int64_t N = S.size(0), n = S.size(-1);
  const int64_t rows = (n + kPanel - 1) / kPanel * kPanel;
  const auto exact = S.options().dtype(at::kDouble);
  Tridiagonal T{at::empty({N, n}, exact), at::empty({N, n}, exact),
                at::zeros({N, rows, n}, S.options())};
  C10_CUDA_CHECK(
      cuda_kernels::tridiagonalise({.A = S.const_data_ptr<float>(),
                                    .reflectors = T.reflectors.mutable_data_ptr<float>(),
                                    .reflector_rows = rows,
                                    .diagonal = T.diagonal.mutable_data_ptr<double>(),
                                    .off_diagonal = T.off_diagonal.mutable_data_ptr<double>(),
                                    .n = static_cast<int>(n),
                                    .count = N},
                                   c10::cuda::getCurrentCUDAStream()));
  return T;
}

// What all merges of T share.
struct MergeBuffers {
  at::Tensor numbers, integers;

  MergeBuffers(int64_t N, int64_t order, const at::TensorOptions& options)
      : numbers(at::empty({5, N, order}, options.dtype(at::kDouble))),
        integers(at::empty({6, N, order}, options.dtype(at::kInt))) {}

  cuda_kernels::TridiagonalMerge merge(const cuda_kernels::TridiagonalMatrices& T, int size,
                                       const at::Tensor& values, const at::Tensor& vectors,
                                       const at::Tensor& S) const {
    const auto number = [&](int64_t i) { return numbers[i].mutable_data_ptr<double>(); };
    const auto integer = [&](int64_t i) { return integers[i].mutable_data_ptr<int>(); };
    return {.T = T,
            .size = size,
            .values = values.mutable_data_ptr<double>(),
            .vectors = vectors.const_data_ptr<float>(),
            .S = S.mutable_data_ptr<float>(),
            .poles_of_block = integer(0),
            .source = integer(1),
            .pole = number(0),
            .z = number(1),
            .origin = integer(2),
            .shift = number(2),
            .rotations_of_block = integer(3),
            .rotated = reinterpret_cast<int2*>(integer(4)),
            .rotation = reinterpret_cast<double2*>(number(3))};
  }
};

// T = X^T diag(values) X. X: [N, n, n], the eigenvectors in rows.
std::pair<at::Tensor, at::Tensor> tridiagonal_eigensystem(const Tridiagonal& T) {
  const int64_t N = T.diagonal.size(0);
  const int n = static_cast<int>(T.diagonal.size(1));
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const cuda_kernels::TridiagonalMatrices matrices{
      T.diagonal.const_data_ptr<double>(), T.off_diagonal.const_data_ptr<double>(),
      cuda_kernels::tridiagonal_shape(n), static_cast<int>(N)};
  const int64_t order = matrices.shape.order();
  const at::TensorOptions options = T.reflectors.options();
  const MergeBuffers buffers(N, order, options);
  const at::Tensor values = at::empty({N, order}, T.diagonal.options());
  int64_t size = matrices.shape.leaf;
  at::Tensor X = at::empty({N * (order / size), size, size}, options);
  C10_CUDA_CHECK(cuda_kernels::solve_leaves(matrices, values.mutable_data_ptr<double>(),
                                            X.mutable_data_ptr<float>(), stream));
  for (size *= 2; size <= order; size *= 2) {
    const int64_t blocks = N * (order / size), half = size / 2;
    const at::Tensor S = at::empty({blocks, size, size}, options);
    C10_CUDA_CHECK(cuda_kernels::merge_tridiagonal(
        buffers.merge(matrices, static_cast<int>(size), values, X, S), stream));
    at::Tensor merged = at::empty_like(S);
    for (int64_t i = 0; i < 2; ++i) {
      at::Tensor columns = merged.narrow(2, i * half, half);
      multiply_strided_out(columns, S.narrow(2, i * half, half),
                           X.view({blocks, 2, half, half}).select(1, i), MatmulPrecision::kHighest);
    }
    X = merged;
  }
  return {values.narrow(1, 0, n), X.narrow(1, 0, n).narrow(2, 0, n)};
}

// X Q^T for rows X [N, n, n] by panels of reflectors: H_i ... H_j = I - V^T U for V with rows
// v_i, ..., v_j, where L U = V and L is the lower triangle of V V^T with half of its diagonal: the
// result is orthogonal for any V. In float64, which takes Hopper no longer: sums of many equal
// products lose up to n / 4 of float32's epsilon.
at::Tensor apply_reflectors(const at::Tensor& X, const at::Tensor& reflectors) {
  const int64_t N = X.size(0), n = X.size(-1), panels = reflectors.size(1) / kPanel;
  at::Tensor result = X.to(at::kDouble);
  const at::Tensor V = reflectors.to(at::kDouble).view({N * panels, kPanel, n});
  at::Tensor L = at::empty({N * panels, kPanel, kPanel}, V.options());
  multiply_strided_out(L, V, V.mT(), MatmulPrecision::kHighest);
  at::Tensor diagonal = L.diagonal(0, 1, 2).mul_(0.5);
  diagonal.masked_fill_(diagonal.eq(0), 1);  // no reflector
  const at::Tensor U = at::linalg_solve_triangular(L, V, /*upper=*/false);
  at::Tensor P = at::empty({N, n, kPanel}, V.options());
  for (int64_t i = panels - 1; i >= 0; --i) {
    const int64_t begin = i * kPanel;
    const auto of_panel = [&](const at::Tensor& of_all) {
      return of_all.view({N, panels, kPanel, n}).select(1, i).narrow(2, begin, n - begin);
    };
    at::Tensor columns = result.narrow(2, begin, n - begin);
    multiply_strided_out(P, columns, of_panel(V).mT(), MatmulPrecision::kHighest);
    multiply_strided_out(columns, P, of_panel(U), MatmulPrecision::kHighest,
                         {.alpha = -1, .beta = 1});
  }
  return result;
}

// On a device; asking the driver takes a millisecond.
int64_t largest_order(c10::DeviceIndex device) {
  static std::array<std::atomic<int>, C10_COMPILE_TIME_MAX_GPUS> plus_one{};  // 0: not asked yet
  int known = plus_one[device].load(std::memory_order_relaxed) - 1;
  if (known < 0) {
    const c10::cuda::CUDAGuard device_guard(device);
    const cudaDeviceProp& properties = *at::cuda::getDeviceProperties(device);
    known = cuda_kernels::largest_tridiagonalised(
        properties.major, properties.minor, static_cast<int>(properties.sharedMemPerBlockOptin));
    plus_one[device].store(known + 1, std::memory_order_relaxed);
  }
  return known;
}

void solve(const at::Tensor& S, const at::Tensor& values, const at::Tensor& rows) {
  const Tridiagonal T = tridiagonal_form(S);
  const auto [exact, X] = tridiagonal_eigensystem(T);
  const at::Tensor is_finite = (T.diagonal.sum(1) * 0).eq(0);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  values.copy_(exact).masked_fill_(is_finite.logical_not().view({-1, 1}), nan);
  rows.copy_(apply_reflectors(X, T.reflectors))
      .masked_fill_(is_finite.logical_not().view({-1, 1, 1}), nan);
}

}  // namespace

bool has_divide_and_conquer(const at::Tensor& S) {
  return S.is_cuda() && S.scalar_type() == at::kFloat && S.size(-1) >= kSmallest &&
         S.size(-1) <= largest_order(S.get_device());
}

Eigensystem divide_and_conquer(const at::Tensor& S) {
  torchium::detail::check_device_code(S.device());
  const c10::cuda::CUDAGuard device_guard(S.device());
  const int64_t N = S.size(0), n = S.size(-1);
  const at::Tensor values = at::empty({N, n}, S.options());
  const at::Tensor rows = at::empty({N, n, n}, S.options());
  const auto shape = cuda_kernels::tridiagonal_shape(static_cast<int>(n));
  const int64_t order = shape.order();
  const int64_t at_once =
      std::max<int64_t>(1, std::min(kMostElements / (order * order), kMostBlocks >> shape.levels));
  for (int64_t begin = 0; begin < N; begin += at_once) {
    const int64_t end = std::min(N, begin + at_once);
    solve(S.slice(0, begin, end), values.slice(0, begin, end), rows.slice(0, begin, end));
  }
  return {values, rows.mT()};
}

#else

bool has_divide_and_conquer(const at::Tensor& S) { return false; }

Eigensystem divide_and_conquer(const at::Tensor& S) {
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
}

#endif

}  // namespace torchium::linalg::detail
