// The memory of an optimizer.
#pragma once

#include "torchium/export.h"

#include <cstdint>
#include <iosfwd>
#include <vector>

namespace torchium::optim {

/// Bytes of the state of an optimizer, by kind.
struct TORCHIUM_API StateMemory {
  /// Second moments of the modes of each block.
  int64_t statistics = 0;
  /// The preconditioners in use.
  int64_t roots = 0;
  /// Averages of the gradients.
  int64_t averages = 0;
  /// Second moments of the grafted method.
  int64_t grafting_second_moments = 0;
  int64_t momentum_buffers = 0;
  /// Diagonal statistics of the parameters of order 0 and 1.
  int64_t diagonals = 0;
  /// Step counts and counts of failed roots.
  int64_t counters = 0;

  int64_t total() const;
  StateMemory& operator+=(const StateMemory& other);
};

/// Memory of a parameter group, or of all.
struct TORCHIUM_API GroupMemory {
  /// Elements of the parameters that are counted.
  int64_t elements = 0;
  /// Bytes of these parameters.
  int64_t parameters = 0;
  StateMemory state;
  /// Scratch memory of captured steps.
  int64_t graphs = 0;
};

/// Memory of an optimizer. `<<` writes a table with one column per group.
struct TORCHIUM_API MemoryReport {
  std::vector<GroupMemory> groups;

  /// Of all groups together.
  GroupMemory total() const;
  TORCHIUM_API friend std::ostream& operator<<(std::ostream& stream, const MemoryReport& report);
};

}  // namespace torchium::optim
