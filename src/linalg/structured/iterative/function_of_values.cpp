#include "linalg/structured/iterative/function_of_values.h"

#include "linalg/common/precision.h"
#include "support/derivatives.h"
#include <torchium/linalg/matrix_functions.h>

#include <ATen/ATen.h>

#include <cmath>
#include <string>

namespace torchium::linalg::detail {

bool MatrixFunction::is_integer_power() const {
  return exponent && std::floor(*exponent) == *exponent && std::abs(*exponent) < 1e9;
}

bool MatrixFunction::is_power_of_few_factors() const {
  constexpr double kMostFactors = 16;
  return is_integer_power() && std::abs(*exponent) >= 2 && std::abs(*exponent) <= kMostFactors;
}

void throw_singular(const char* kind, const MatrixFunction& f, const std::string& why) {
  TORCH_CHECK_VALUE(false, kind, ".", f.name, ": the operator is singular: ", why,
                    ". Add a multiple of the identity.");
}

double eigenvalue_rounding(const at::Tensor& values) {
  return epsilon_of(c10::toRealValueType(values.scalar_type())) *
         static_cast<double>(values.size(-1));
}

at::Tensor function_of_values(const char* kind, const MatrixFunction& f, const at::Tensor& values,
                              double noise) {
  if (!f.exponent) {
    return values.exp();
  }
  const double p = *f.exponent;
  const at::Tensor largest = values.detach().abs().amax({-1}, /*keepdim=*/true);
  if (p < 0) {
    const at::Tensor is_zero = values.detach().abs() <= noise * largest;
    if (is_zero.any().item<bool>()) {
      throw_singular(kind, f,
                     noise > 0 ? "an eigenvalue is zero up to rounding" : "an eigenvalue is zero");
    }
  }
  if (f.is_integer_power()) {
    return values.pow(p);
  }
  const at::Tensor real = values.is_complex() ? at::real(values.detach()) : values.detach();
  at::Tensor is_negative = real < 0;
  if (values.is_complex()) {
    is_negative = is_negative.logical_and(at::imag(values.detach()).abs() <= noise * largest);
  }
  TORCH_CHECK_VALUE(!is_negative.logical_and(real < -noise * largest).any().item<bool>(), kind, ".",
                    f.name, ": an eigenvalue is negative, ", real.min().item<double>(),
                    "; the power ", p, " is not real. Powers with integer exponents are.");
  // Rounding errors of zeros.
  return at::where(is_negative, at::zeros_like(values), values).pow(p);
}

std::tuple<at::Tensor, at::Tensor> symmetric_eigensystem_of(const at::Tensor& A) {
  return torchium::detail::is_differentiated(A) ? at::linalg_eigh(A) : eigh(A);
}

namespace {

at::Tensor inverse_of_dense(const char* kind, const MatrixFunction& f, const at::Tensor& A) {
  const auto [inverse, info] = at::linalg_inv_ex(A);
  if (info.gt(0).any().item<bool>()) {
    throw_singular(kind, f, "a pivot is zero");
  }
  return inverse;
}

// V f(Lambda) V^-1, for matrices with a well-conditioned basis of eigenvectors.
at::Tensor function_by_eigenvectors(const char* kind, const MatrixFunction& f,
                                    const at::Tensor& A) {
  const auto [values, V] = at::linalg_eig(A);
  const at::Tensor inverse = std::get<0>(at::linalg_inv_ex(V));
  const at::Tensor reproduced = at::real((V * values.unsqueeze(-2)).matmul(inverse));
  const double error = (reproduced - A).detach().norm().item<double>();
  const double tol = std::sqrt(epsilon_of(A.scalar_type())) * A.detach().norm().item<double>();
  const std::string how = std::isfinite(error)
                              ? c10::str("reproduce it with an error of norm ", error)
                              : "are linearly dependent up to rounding";
  TORCH_CHECK_VALUE(error <= tol, kind, ".", f.name,
                    ": the matrix has no well-conditioned basis of eigenvectors (they ", how,
                    "); only integer powers and exp can be computed.");
  const at::Tensor image = function_of_values(kind, f, values, eigenvalue_rounding(values));
  return at::real((V * image.unsqueeze(-2)).matmul(inverse));
}

}  // namespace

at::Tensor function_of_dense(const char* kind, const MatrixFunction& f, const at::Tensor& A,
                             bool symmetric) {
  if (f.is_integer_power()) {
    const auto p = static_cast<int64_t>(*f.exponent);
    return at::linalg_matrix_power(p < 0 ? inverse_of_dense(kind, f, A) : A, std::abs(p));
  }
  if (symmetric && torchium::detail::is_differentiated(A)) {
    if (!f.exponent) {
      return at::linalg_matrix_exp((A + A.mT()) / 2);
    }
    const at::Tensor values = std::get<0>(eigh(A.detach()));
    function_of_values(kind, f, values, eigenvalue_rounding(values));  // its errors
    return matrix_power(A, *f.exponent);
  }
  if (symmetric) {
    const auto [values, V] = symmetric_eigensystem_of(A);
    const at::Tensor image = function_of_values(kind, f, values, eigenvalue_rounding(values));
    return (V * image.unsqueeze(-2)).matmul(V.mT());
  }
  return f.exponent ? function_by_eigenvectors(kind, f, A) : at::linalg_matrix_exp(A);
}

}  // namespace torchium::linalg::detail
