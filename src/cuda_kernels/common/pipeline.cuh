// Hopper's tile copies between device memory and the shared memory of a cluster, and the barriers
// between the warps that copy and those that compute (sm_90a).
#pragma once

#include <cstdint>
#include <cuda.h>

namespace torchium::cuda_kernels {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The current position in a ring of `slots` barriers.
template <int slots>
class Position {
 public:
  __device__ uint32_t slot() const { return slot_; }
  __device__ uint32_t previous_slot() const { return slot_ == 0 ? slots - 1 : slot_ - 1; }
  __device__ uint32_t parity() const { return parity_; }
  __device__ void advance() {
    slot_ = slot_ + 1 == slots ? 0 : slot_ + 1;
    if (slot_ == 0) parity_ ^= 1;
  }

 private:
  uint32_t slot_ = 0, parity_ = 0;
};

// Barriers are 8 bytes of shared memory, identified by their address.
__device__ inline void initialize_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to copies and to the cluster.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void arrive_and_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives at the same barrier in block `rank` of the cluster.
__device__ inline void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Stores in block `rank` of the cluster, at the address that is `target` in this one; the same
// barrier there counts the bytes.
__device__ inline void store_at(uint32_t target, const float4& x, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote, %0, %6;\n"
      "mapa.shared::cluster.u32 remote_barrier, %5, %6;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [remote], {%1, %2, %3, %4},"
      " [remote_barrier];\n"
      "}\n" ::"r"(target),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier), "r"(rank)
      : "memory");
}

// Waits for the end of the phase with this parity; the phase before the first has parity 1.
__device__ inline void wait_for(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Copies the box at column x, row y, plane z to `target`; `barrier` counts its bytes.
__device__ inline void copy_box(uint32_t target, const CUtensorMap& map, int x, int y, int z,
                                uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(target),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// The same for matrices with several parts.
__device__ inline void copy_box_of_part(uint32_t target, const CUtensorMap& map, int x, int y,
                                        int z, int part, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(target),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(x), "r"(y), "r"(z), "r"(part), "r"(barrier)
      : "memory");
}

// copy_box to all blocks of the mask, each with its own target and barrier.
__device__ inline void copy_box_to_all(uint32_t target, const CUtensorMap& map, int x, int y, int z,
                                       uint32_t barrier, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(mask)
      : "memory");
}

__device__ inline void copy_box_of_part_to_all(uint32_t target, const CUtensorMap& map, int x,
                                               int y, int z, int part, uint32_t barrier,
                                               uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(target),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(x), "r"(y), "r"(z), "r"(part), "r"(barrier),
      "h"(mask)
      : "memory");
}

// Copies a box of this block back to device memory, except what lies outside the matrix. Shared
// memory must have been published before.
__device__ inline void write_box(uint32_t source, const CUtensorMap& map, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(
          reinterpret_cast<uint64_t>(&map)),
      "r"(x), "r"(y), "r"(z), "r"(source)
      : "memory");
}

// Waits until the boxes written by this thread have left shared memory.
__device__ inline void wait_for_writes() {
  asm volatile(
      "cp.async.bulk.commit_group;\n"
      "cp.async.bulk.wait_group.read 0;" ::
          : "memory");
}

// Publishes this thread's ordinary writes to shared memory to copies and tensor cores.
__device__ inline void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline uint32_t rank_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// A barrier for the 128 threads of a warpgroup; id: 1 to 15.
__device__ inline void warpgroup_sync(int id) {
  asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

// Lets blocks of the next kernel in the stream start as blocks of this one finish.
__device__ inline void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits for the end of the previous kernels, if this one was started early.
__device__ inline void wait_for_prerequisites() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

template <int registers>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

#endif

}  // namespace torchium::cuda_kernels
