// The coupled iteration for batched float32 matrices by torchium's kernels: up to n = 128 in one
// launch, above that on Hopper's tensor cores.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::linalg::detail {

// Whether device_inverse_root supports A [N, n, n].
bool has_device_root(const at::Tensor& A, int64_t p);

// An upper bound of the bytes of the buffers for matrices of this order, above 128, unless one
// matrix alone needs more: 4 n^2 floats per matrix, n rounded up to a multiple of 32. Half of it
// costs 2 to 4 % of the time at n = 512 and 1024, but 6 % at 2048.
constexpr int64_t large_root_buffer_limit(int64_t order) {
  return order > 512 && order <= 1024 ? int64_t{1} << 29 : int64_t{1} << 30;
}

// Everything in the units of A; NaN for a matrix with NaN or Inf.
struct DeviceRoot {
  at::Tensor root;        // [N, n, n] float32
  at::Tensor residual;    // [N] float32, estimated by one vector of random signs
  at::Tensor damping;     // [N] float64
  at::Tensor iterations;  // [N] int64
  at::Tensor floor;       // [N] float64
};

// As newton_inverse_root for the symmetric part of A. A failed root is replaced by a multiple of
// the identity; its `iterations` is 0. The host reads nothing.
DeviceRoot device_inverse_root(const at::Tensor& A, int64_t p, double eps, double relative_eps);

// Roots of N matrices on one device, updated in place.
struct RenewedRoots {
  at::Tensor roots;     // [N, n, n] float32, contiguous
  at::Tensor failures;  // [N] int32, contiguous: consecutive failures
  at::Tensor keep;      // 0-dim bool: whether anything may change; undefined: yes
};

// Writes (A / c + (eps + relative_eps s) I)^(-1/p) to the roots, s the bound of A / c. A root is
// not accepted if A / c is not finite, the residual is above 0.25 or the root leaves the range of
// float32. That matrix then keeps its old root and counts one more failure; the others count none.
// A: [N, n, n], contiguous, supported by has_device_root. divisors: the c of each matrix, [N]
// float64, contiguous; undefined: 1. Needs only the workspace of device_inverse_root; the host
// reads nothing.
void renew_inverse_roots(const at::Tensor& A, const at::Tensor& divisors, int64_t p, double eps,
                         double relative_eps, const RenewedRoots& renewed);

}  // namespace torchium::linalg::detail
