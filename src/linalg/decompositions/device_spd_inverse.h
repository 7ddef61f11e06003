// Inverses of symmetric positive definite float32 matrices on a GPU.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// Whether the classes below support A.
bool has_device_spd_inverse(const at::Tensor& A);

// (A + damping I)^-1 of float32 matrices [..., n, n], without a host wait.
//
// By the coupled iteration, whose last step leaves errors up to 1e-4, and one step of Newton's
// method, which squares them. Up to n = 256 by sweeping, in one launch; there only matrices with a
// pivot that may be a rounding error are left to the iteration, which has a floor.
class DeviceSpdInverse {
 public:
  DeviceSpdInverse(const at::Tensor& A, double damping);

  at::Tensor inverse() const;  // exactly symmetric
  // Of B. With one step of refinement, except for singular matrices: that would be noise.
  at::Tensor solution(const at::Tensor& B) const;

 private:
  at::Tensor damped() const;  // A + damping I, symmetrised

  at::Tensor A_, inverse_;
  at::Tensor is_singular_;  // [..., 1, 1]; undefined: not swept
  double damping_;
};

}  // namespace torchium::linalg::detail
