// The coupled iteration for batched float32 matrices by torchium's kernels: up to n = 128 in one
// launch, above that on Hopper's tensor cores.
#pragma once

#include "torchium/export.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

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

// The same of A + s I for p = 1, where s is the damping of each matrix, [N] float64, but at least
// least_damping |A|_F.
TORCHIUM_API DeviceRoot device_inverse(const at::Tensor& A, const at::Tensor& dampings,
                                       double least_damping);

// Writes (A + damping I)^-1 to the inverses [N, n, n] of the matrices of which `wanted` [N] is
// true. Both are contiguous. The host reads nothing.
void device_inverse_where(const at::Tensor& A, double damping, const at::Tensor& wanted,
                          const at::Tensor& inverses);

// N matrices, and their roots, which are updated in place.
struct RootRenewal {
  at::Tensor A;         // [N, n, n], contiguous, supported by has_device_root
  at::Tensor divisors;  // [N] float64, contiguous: the c of each matrix; undefined: 1
  at::Tensor roots;     // [N, n, n] float32, contiguous
  at::Tensor failures;  // [N] int32, contiguous: consecutive failures
};

// Writes (A / c + (eps + relative_eps s) I)^(-1/p) to the roots of all batches, which are on one
// device; s is the bound of A / c. A root is not accepted if A / c is not finite, the residual is
// above 0.25 or the root leaves the range of float32. That matrix then keeps its old root and
// counts one more failure; the others count none. keep: 0-dim bool, whether anything may change;
// undefined: yes. Batches are solved at the same time on several streams, with the workspaces of
// device_inverse_root for all of them, as long as these fit in 1 GiB together. The host reads
// nothing.
void renew_inverse_roots(const std::vector<RootRenewal>& batches, int64_t p, double eps,
                         double relative_eps, const at::Tensor& keep);

}  // namespace torchium::linalg::detail
