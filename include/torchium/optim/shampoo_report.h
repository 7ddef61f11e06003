// The rule of each parameter in Shampoo.
#pragma once

#include "torchium/export.h"

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace torchium::optim {

/// How Shampoo treats one parameter.
struct TORCHIUM_API ParameterReport {
  /// Its name in the model, or "parameter 1 of group 0".
  std::string name;
  std::vector<int64_t> shape;
  /// Its parameter group.
  size_t group = 0;
  /// "preconditioned" (by the roots of its blocks), "diagonal", "adam", "rmsprop" or "adagrad" (the
  /// direction of the grafted method itself), or "none" for one that requires no gradient and has
  /// no state.
  std::string rule;
  /// The blocks and the exponent of the roots, or why no matrices precondition it.
  std::string detail;
  /// Bytes of its state; before its first step, of its future state.
  int64_t state_bytes = 0;
};

/// How Shampoo treats each parameter. `<<` writes a table with one line per parameter.
struct TORCHIUM_API ShampooReport {
  std::vector<ParameterReport> parameters;

  TORCHIUM_API friend std::ostream& operator<<(std::ostream& stream, const ShampooReport& report);
};

}  // namespace torchium::optim
