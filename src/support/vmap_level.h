// torch.vmap for C++ functions: operators on batched tensors compute all samples at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::detail {

// While it lives, operators of this thread take tensors of batched() for one of their slices.
// Operators that draw random numbers or read values raise; those without a batching rule compute
// one slice after the other, without torch's warning.
class VmapLevel {
 public:
  explicit VmapLevel(int64_t size);
  ~VmapLevel();
  VmapLevel(const VmapLevel&) = delete;
  VmapLevel& operator=(const VmapLevel&) = delete;

  // x [size, ...], as a tensor of the shape of x[0].
  at::Tensor batched(const at::Tensor& x) const;
  // [size, ...] from what has been computed for one slice.
  at::Tensor all(const at::Tensor& of_slice) const;

 private:
  int64_t size_;
  int64_t level_;
  bool warned_before_;
};

}  // namespace torchium::detail
