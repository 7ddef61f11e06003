// Kernels with the instructions that only Hopper has (compute capability 9.0a).
#pragma once

namespace torchium::cuda_kernels {

// Whether such a kernel of this source, which needs so many bytes of shared memory per block, was
// compiled and runs on a device. `shared_bytes`: what a block of the device may ask for.
static inline bool has_hopper_kernel(int major, int minor, int shared_bytes, int needed) {
#ifdef TORCHIUM_HAS_SM90A
  return major == 9 && minor == 0 && shared_bytes >= needed;
#else
  return false;
#endif
}

}  // namespace torchium::cuda_kernels
