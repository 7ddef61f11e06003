// The memory of an optimizer.
#pragma once

#include "torchium/export.h"

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace torchium::optim {

/// Bytes of the state of an optimizer, by kind.
struct TORCHIUM_API StateMemory {
  /// Second moments of the modes of each block. K-FAC: factors, Fisher blocks of norms, and second
  /// moments of EKFAC.
  int64_t statistics = 0;
  /// The preconditioners in use. K-FAC: inverses, or eigenvectors and eigenvalues; K and C.
  int64_t roots = 0;
  /// Averages of the gradients. K-FAC: m_K and m_C.
  int64_t averages = 0;
  /// Second moments of the grafted method.
  int64_t grafting_second_moments = 0;
  int64_t momentum_buffers = 0;
  /// Diagonal statistics: of Shampoo those of the parameters of order 0 and 1, sums of Adagrad,
  /// diagonals of the Hessian and averages of their squares of AdaHessian.
  int64_t diagonals = 0;
  /// Layer calls that NaturalGradient keeps with update_freq above 1.
  int64_t batches = 0;
  /// Step counts, and counts of updates and of failed roots.
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
  /// Tensors that a step leaves for later ones besides the state: numbers of kernels,
  /// factorisations, squares and fp16 parts of roots. Not the layer calls between backward() and
  /// step().
  int64_t workspace = 0;
  /// Scratch memory of captured steps.
  int64_t graphs = 0;

  GroupMemory& operator+=(const GroupMemory& other);
};

/// State of one parameter.
struct TORCHIUM_API ParameterMemory {
  /// In the model, or its place in the groups.
  std::string name;
  size_t group;
  StateMemory state;
};

/// Memory of an optimizer. `<<` writes a table with one column per group.
struct TORCHIUM_API MemoryReport {
  std::vector<GroupMemory> groups;
  /// What belongs to no group alone: workspace and captured steps of the optimizers that step all
  /// groups together.
  GroupMemory joint;
  /// Of the parameters that are counted. A tensor of several is that of the first.
  std::vector<ParameterMemory> parameters;

  /// Of all groups together.
  GroupMemory total() const;
  TORCHIUM_API friend std::ostream& operator<<(std::ostream& stream, const MemoryReport& report);
};

}  // namespace torchium::optim
