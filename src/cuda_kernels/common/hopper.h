// Kernels with the instructions that only Hopper has (compute capability 9.0a).
#pragma once

namespace torchium::cuda_kernels {

// Whether kernels for Hopper were compiled in this source and run on the device. `needed`: bytes of
// shared memory per block. `shared_bytes`: the most that a block may request on the device.
static inline bool has_hopper_kernel(int major, int minor, int shared_bytes, int needed) {
#ifdef TORCHIUM_HAS_SM90A
  return major == 9 && minor == 0 && shared_bytes >= needed;
#else
  return false;
#endif
}

}  // namespace torchium::cuda_kernels
