// Functions of eigenvalues.
#pragma once

#include "linalg/structured/operator_node.h"

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// f of real or complex eigenvalues [...], for `kind`, the operator's class. Values below
// `noise` times the largest magnitude along the last dimension are rounding errors. Raises if a
// value is zero (negative powers) or negative (powers that are no integers) beyond rounding; the
// host waits then.
at::Tensor function_of_values(const char* kind, const MatrixFunction& f, const at::Tensor& values,
                              double noise);

// f of dense matrices A [..., n, n]; inverses are formed.
at::Tensor function_of_dense(const char* kind, const MatrixFunction& f, const at::Tensor& A,
                             bool symmetric);

// Eigenvalues, ascending, and eigenvectors of symmetric matrices; differentiable where needed.
std::tuple<at::Tensor, at::Tensor> symmetric_eigensystem_of(const at::Tensor& A);

// epsilon n: rounding errors of eigenvalues in units of the largest one.
double eigenvalue_rounding(const at::Tensor& values);

[[noreturn]] void throw_singular(const char* kind, const MatrixFunction& f, const std::string& why);

}  // namespace torchium::linalg::detail
