// What the ranks of a process group exchange before a step: numbers, of each of which all ranks
// then have the largest.
#pragma once

#include <cstdint>
#include <limits>

namespace torchium::cuda_kernels {

// After a number with which all must agree comes its negative.
enum MessageSlot : int {
  kError,
  kFailure,
  kFoundInf,
  kRenews,
  kSetup,
  kMask = kSetup + 2,
  kLayers = kMask + 2,
  kGroupCount = kLayers + 2,
  kCounts = kGroupCount + 2,  // this and the next may differ
  kNewMemory = kCounts + 2,
  kGroups = kNewMemory + 2,  // two numbers of each: of its gradients, and of its roots
};
constexpr int kMostMessageGroups = 128;
constexpr int kMessageSize = kGroups + 2 * kMostMessageGroups;

// The first unfit parameter of a group is sent as its distance from this; 0: none.
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

}  // namespace torchium::cuda_kernels
