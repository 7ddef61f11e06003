// Options and right-hand sides of iterative solvers. Every error is a c10::ValueError.
#pragma once

#include "linalg/common/operator_checks.h"
#include "linalg/common/precision.h"
#include <torchium/linalg/linear_operator.h>

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <optional>

namespace torchium::linalg::detail {

inline void check_solver(const char* function, std::optional<double> tol, int64_t max_iterations) {
  TORCH_CHECK_VALUE(!tol || (std::isfinite(*tol) && *tol >= 0), function, ": tol is ",
                    tol.value_or(0.0), "; it must be finite and not negative.");
  check_positive(function, "max_iterations", max_iterations);
}

inline double tolerance(std::optional<double> tol, at::ScalarType dtype) {
  return tol.value_or(std::pow(epsilon_of(dtype), 2.0 / 3.0));
}

}  // namespace torchium::linalg::detail
