// Symmetric eigenproblems of moderate order on a CUDA device, by tridiagonal matrices.
#pragma once

#include "linalg/spectral/eigh.h"

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// Whether divide_and_conquer supports S [N, n, n] and is faster than cuSOLVER.
bool has_divide_and_conquer(const at::Tensor& S);

// symmetric_eigensystem by Householder's reduction to tridiagonal form, Cuppen's divide and conquer
// with the vectors of Gu and Eisenstat (1995), and the compact form of the reflectors. The host
// reads nothing. Eigenvalues and vectors of a matrix that is not finite are NaN.
Eigensystem divide_and_conquer(const at::Tensor& S);

}  // namespace torchium::linalg::detail
