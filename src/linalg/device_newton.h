// The coupled iteration for stacks of float32 matrices by kernels of our own: up to n = 128 in one
// launch, above on Hopper's tensor cores.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::linalg::detail {

// Whether device_inverse_root can take A [N, n, n].
bool has_device_root(const at::Tensor& A, int64_t p);

// Everything in the units of A; NaN for a matrix that holds NaN or Inf.
struct DeviceRoot {
  at::Tensor root;        // [N, n, n] float32
  at::Tensor residual;    // [N] float32, estimated by one vector of random signs
  at::Tensor damping;     // [N] float64
  at::Tensor iterations;  // [N] int64
  at::Tensor floor;       // [N] float64
};

// As newton_inverse_root for the symmetric part of A. A root that fails is replaced by a multiple
// of the identity; its `iterations` is 0. Nothing is read on the host.
DeviceRoot device_inverse_root(const at::Tensor& A, int64_t p, double eps, double relative_eps);

}  // namespace torchium::linalg::detail
