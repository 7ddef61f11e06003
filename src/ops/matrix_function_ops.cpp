// Operators and C++ functions of torchium/linalg/matrix_functions.h.
#include "linalg/common/operand_checks.h"
#include "linalg/matrix_functions/matrix_functions.h"
#include "linalg/spectral/checked_eigh.h"
#include "ops/find_operator.h"
#include "ops/refuse_gradients.h"
#include "ops/registration.h"
#include <torchium/linalg/matrix_functions.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>

namespace torchium::ops {
namespace {

using at::Tensor;
using linalg::detail::compute_dtype;
using InfoTuple = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using PowerTuple = std::tuple<Tensor, Tensor, Tensor>;

void check_matrix(const char* op, const Tensor& A) {
  linalg::detail::check_floating(op, {"A", A});
  linalg::detail::check_square(op, {"A", A});
}

void check_not_negative(const char* op, const char* name, double value) {
  TORCH_CHECK_VALUE(value >= 0 && std::isfinite(value), op, ": ", name, " is ", value,
                    "; it must be a finite number >= 0.");
}

void check_damping(const char* op, double eps, double relative_eps) {
  check_not_negative(op, "eps", eps);
  check_not_negative(op, "relative_eps", relative_eps);
}

void check_inverse_root(const Tensor& A, int64_t root, double eps, double relative_eps,
                        c10::string_view method) {
  constexpr const char* kOp = "matrix_inverse_root";
  check_matrix(kOp, A);
  TORCH_CHECK_VALUE(root >= 1, kOp, ": root is ", root,
                    "; it must be a positive integer. For other exponents use matrix_power.");
  check_damping(kOp, eps, relative_eps);
  TORCH_CHECK_VALUE(method == "auto" || method == "eigh" || method == "newton", kOp,
                    ": method is '", method, "'; it must be 'auto', 'eigh' or 'newton'.");
}

void check_power(const Tensor& A, double exponent, double eps, double relative_eps) {
  check_matrix("matrix_power", A);
  TORCH_CHECK_VALUE(std::isfinite(exponent), "matrix_power: exponent is ", exponent,
                    "; it must be a finite number.");
  check_damping("matrix_power", eps, relative_eps);
}

Tensor to_compute_dtype(const Tensor& A) { return A.to(compute_dtype(A)); }

// Back to a 16-bit dtype, saturating instead of overflowing; NaN stays NaN.
Tensor to_dtype_of(const Tensor& A, Tensor result) {
  if (result.scalar_type() == A.scalar_type()) {
    return result;
  }
  const double limit = A.scalar_type() == at::kHalf ? std::numeric_limits<at::Half>::max()
                                                    : std::numeric_limits<at::BFloat16>::max();
  return result.clamp_(-limit, limit).to(A.scalar_type());
}

Tensor inverse_root(const Tensor& A, int64_t root, double eps, double relative_eps,
                    c10::string_view method) {
  check_inverse_root(A, root, eps, relative_eps, method);
  auto result =
      linalg::detail::matrix_inverse_root(to_compute_dtype(A), root, eps, relative_eps,
                                          std::string(method), linalg::detail::Residual::kNone);
  return to_dtype_of(A, result.root);
}

InfoTuple inverse_root_info(const Tensor& A, int64_t root, double eps, double relative_eps,
                            c10::string_view method) {
  check_inverse_root(A, root, eps, relative_eps, method);
  auto result =
      linalg::detail::matrix_inverse_root(to_compute_dtype(A), root, eps, relative_eps,
                                          std::string(method), linalg::detail::Residual::kExact);
  return {to_dtype_of(A, result.root), result.residual, result.iterations, result.floor};
}

// The power and what its derivative needs.
PowerTuple power(const Tensor& A, double exponent, double eps, double relative_eps) {
  check_power(A, exponent, eps, relative_eps);
  auto result = linalg::detail::matrix_power_with_eigensystem(to_compute_dtype(A), exponent, eps,
                                                              relative_eps);
  return {to_dtype_of(A, result.power), result.values, result.vectors};
}

Tensor power_alone(const Tensor& A, double exponent, double eps, double relative_eps) {
  check_power(A, exponent, eps, relative_eps);
  return to_dtype_of(
      A, linalg::detail::matrix_power(to_compute_dtype(A), exponent, eps, relative_eps));
}

// The two directions of the derivative. A: what the result depends on besides its gradient or
// tangent, for autograd.
Tensor power_backward(const Tensor& grad, const Tensor& /*A*/, const Tensor& values,
                      const Tensor& vectors, double exponent, double relative_eps) {
  return to_dtype_of(
      grad, linalg::detail::matrix_power_backward(grad.to(vectors.scalar_type()), values, vectors,
                                                  exponent, relative_eps));
}

Tensor power_forward(const Tensor& tangent, const Tensor& /*A*/, const Tensor& values,
                     const Tensor& vectors, double exponent, double relative_eps) {
  return to_dtype_of(tangent,
                     linalg::detail::matrix_power_forward(tangent.to(vectors.scalar_type()), values,
                                                          vectors, exponent, relative_eps));
}

std::tuple<Tensor, Tensor> eigensystem(const Tensor& A) {
  check_matrix("eigh", A);
  auto [values, vectors] = linalg::detail::eigh(to_compute_dtype(A));
  return {to_dtype_of(A, values), to_dtype_of(A, vectors)};
}

// Shapes and dtypes alone.

Tensor inverse_root_meta(const Tensor& A, int64_t root, double eps, double relative_eps,
                         c10::string_view method) {
  check_inverse_root(A, root, eps, relative_eps, method);
  return A.new_empty_symint(A.sym_sizes());
}

InfoTuple inverse_root_info_meta(const Tensor& A, int64_t root, double eps, double relative_eps,
                                 c10::string_view method) {
  check_inverse_root(A, root, eps, relative_eps, method);
  const auto batch = A.sym_sizes().slice(0, A.dim() - 2);
  const auto real = A.options().dtype(compute_dtype(A));
  return {A.new_empty_symint(A.sym_sizes()), A.new_empty_symint(batch, real),
          A.new_empty_symint(batch, A.options().dtype(at::kLong)), A.new_empty_symint(batch, real)};
}

PowerTuple power_meta(const Tensor& A, double exponent, double eps, double relative_eps) {
  check_power(A, exponent, eps, relative_eps);
  return {A.new_empty_symint(A.sym_sizes()),
          A.new_empty_symint(A.sym_sizes().slice(0, A.dim() - 1), A.options().dtype(at::kDouble)),
          A.new_empty_symint(A.sym_sizes(), A.options().dtype(compute_dtype(A))).mT()};
}

Tensor power_alone_meta(const Tensor& A, double exponent, double eps, double relative_eps) {
  return std::get<0>(power_meta(A, exponent, eps, relative_eps));
}

Tensor power_half_meta(const Tensor& direction, const Tensor&, const Tensor&, const Tensor&, double,
                       double) {
  return direction.new_empty_symint(direction.sym_sizes());
}

std::tuple<Tensor, Tensor> eigensystem_meta(const Tensor& A) {
  check_matrix("eigh", A);
  return {A.new_empty_symint(A.sym_sizes().slice(0, A.dim() - 1)),
          A.new_empty_symint(A.sym_sizes()).mT()};
}

constexpr char kRootRemedy[] = "Use matrix_power(A, -1.0 / root, ...), or pass A.detach().";
constexpr char kEighRemedy[] = "Use torch.linalg.eigh, or pass A.detach().";

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  m.def("eigh_retries() -> int", [] { return linalg::detail::eigh_retries(); });
  define(m,
         "matrix_inverse_root(Tensor A, int root, *, float eps=0.0, float relative_eps=0.0, "
         "str method=\"auto\") -> Tensor",
         inverse_root, inverse_root_meta, refuse_gradients_kernel<kRootRemedy>());
  define(m,
         "matrix_inverse_root_info(Tensor A, int root, *, float eps=0.0, float relative_eps=0.0, "
         "str method=\"auto\") -> (Tensor root, Tensor residual, Tensor iterations, Tensor floor)",
         inverse_root_info, inverse_root_info_meta, refuse_gradients_kernel<kRootRemedy>());
  define(m, "eigh(Tensor A) -> (Tensor eigenvalues, Tensor eigenvectors)", eigensystem,
         eigensystem_meta, refuse_gradients_kernel<kEighRemedy>());
  define(
      m,
      "matrix_power(Tensor A, float exponent, *, float eps=0.0, float relative_eps=0.0) -> Tensor",
      power_alone, power_alone_meta);
  // The parts of its derivative.
  define(m,
         "_matrix_power(Tensor A, float exponent, float eps, float relative_eps) -> "
         "(Tensor power, Tensor eigenvalues, Tensor eigenvectors)",
         power, power_meta);
  define(m,
         "_matrix_power_backward(Tensor grad, Tensor A, Tensor eigenvalues, Tensor eigenvectors, "
         "float exponent, float relative_eps) -> Tensor",
         power_backward, power_half_meta);
  define(m,
         "_matrix_power_forward(Tensor tangent, Tensor A, Tensor eigenvalues, Tensor eigenvectors, "
         "float exponent, float relative_eps) -> Tensor",
         power_forward, power_half_meta);
}

}  // namespace torchium::ops

namespace torchium::linalg {

using ops::call_operator;

at::Tensor matrix_inverse_root(const at::Tensor& A, int64_t root,
                               const InverseRootOptions& options) {
  return call_operator<&ops::inverse_root>("matrix_inverse_root", A, root, options.eps,
                                           options.relative_eps, options.method);
}

InverseRootInfo matrix_inverse_root_info(const at::Tensor& A, int64_t root,
                                         const InverseRootOptions& options) {
  auto [X, residual, iterations, floor] = call_operator<&ops::inverse_root_info>(
      "matrix_inverse_root_info", A, root, options.eps, options.relative_eps, options.method);
  return {X, residual, iterations, floor};
}

at::Tensor matrix_power(const at::Tensor& A, double exponent, double eps, double relative_eps) {
  return call_operator<&ops::power_alone>("matrix_power", A, exponent, eps, relative_eps);
}

int64_t eigh_retries() { return detail::eigh_retries(); }

std::tuple<at::Tensor, at::Tensor> eigh(const at::Tensor& A) {
  return call_operator<&ops::eigensystem>("eigh", A);
}

}  // namespace torchium::linalg
