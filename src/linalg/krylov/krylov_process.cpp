#include "linalg/krylov/krylov_process.h"

#include "linalg/operators/operator_checks.h"
#include "linalg/operators/random_signs.h"
#include "linalg/precision.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace torchium::linalg::detail {
namespace {

// Residuals, in units of epsilon and the largest eigenvalue, that may be rounding errors.
constexpr double kRoundingErrors = 100.0;

const char* method_name(bool symmetric) { return symmetric ? "lanczos" : "arnoldi"; }

int64_t basis_size(const char* name, int64_t k, const KrylovOptions& options) {
  const int64_t least = k + 2 * options.block_size;
  const int64_t size =
      options.max_basis.value_or(std::max<int64_t>(2 * k + 1, 20) + 2 * options.block_size);
  TORCH_CHECK_VALUE(size >= least, name, ": max_basis is ", size, "; it must be at least k + 2 ",
                    "block_size = ", least, ".");
  return size;
}

void check_options(bool symmetric, int64_t n, int64_t k, const KrylovOptions& options) {
  const char* name = method_name(symmetric);
  const std::set<std::string> known = symmetric ? std::set<std::string>{"LA", "SA", "LM"}
                                                : std::set<std::string>{"LM", "LR", "SR", "LI"};
  TORCH_CHECK_VALUE(k > 0 && k <= n, name, ": k is ", k, "; it must be between 1 and n = ", n, ".");
  TORCH_CHECK_VALUE(known.count(options.which) == 1, name, ": which is \"", options.which,
                    "\"; it must be ",
                    symmetric ? "\"LA\", \"SA\" or \"LM\"." : "\"LM\", \"LR\", \"SR\" or \"LI\".");
  check_positive(name, "block_size", options.block_size);
  TORCH_CHECK_VALUE(options.max_restarts >= 0, name, ": max_restarts is ", options.max_restarts,
                    "; it must not be negative.");
  const double tol = options.tol.value_or(0.0);
  TORCH_CHECK_VALUE(tol >= 0 && std::isfinite(tol), name, ": tol is ", tol,
                    "; it must be finite and not negative.");
}

}  // namespace

KrylovProcess::KrylovProcess(bool symmetric, int64_t n, int64_t k, const KrylovOptions& options,
                             const at::TensorOptions& tensor_options)
    : symmetric_(symmetric), n_(n), k_(k), options_(options), tensor_options_(tensor_options) {
  check_operator(method_name(symmetric), n, tensor_options);
  if (options_.which.empty()) {
    options_.which = symmetric ? "LA" : "LM";
  }
  check_options(symmetric, n, k, options_);
  epsilon_ = epsilon_of(c10::typeMetaToScalarType(tensor_options.dtype()));
  tol_ = options_.tol.value_or(std::pow(epsilon_, 2.0 / 3.0));
  const int64_t capacity = basis_size(method_name(symmetric), k, options_);
  const at::Tensor first = start();
  // A small operator is formed: its Krylov space may be the whole space.
  if (n > capacity + options_.block_size) {
    space_ = std::make_unique<KrylovSpace>(first, capacity, options_.seed);
  }
}

at::Tensor KrylovProcess::start() const {
  if (!options_.start.defined()) {
    return random_signs(n_, std::min(options_.block_size, n_), options_.seed, 0, tensor_options_);
  }
  const at::Tensor& given = options_.start;
  const bool fits = given.scalar_type() == c10::typeMetaToScalarType(tensor_options_.dtype()) &&
                    given.device() == tensor_options_.device();
  const at::Tensor start = (given.dim() == 1 ? given.unsqueeze(1) : given).detach();
  TORCH_CHECK_VALUE(
      fits && start.dim() == 2 && start.size(0) == n_ && start.size(1) == options_.block_size,
      method_name(symmetric_), ": start is ", given.sizes(), " of ", given.scalar_type(), " on ",
      given.device(), "; it must be [", n_, ", ", options_.block_size,
      "], of the operator's dtype and device.");
  TORCH_CHECK_VALUE(at::isfinite(start).all().item<bool>(), method_name(symmetric_),
                    ": start is not finite.");
  return start;
}

at::Tensor KrylovProcess::next_operand() {
  if (!result_.empty()) return {};
  return solves_densely() ? at::eye(n_, tensor_options_) : space_->operand();
}

void KrylovProcess::use(const at::Tensor& /*operand*/, const at::Tensor& product) {
  if (solves_densely()) {
    solve_densely(product);
    return;
  }
  space_->extend(product);
  if (space_->is_full()) {
    restart_or_finish();
  }
}

void KrylovProcess::check_projection(const at::Tensor& H) const {
  const char* name = method_name(symmetric_);
  TORCH_CHECK_VALUE(at::isfinite(H).all().item<bool>(), name,
                    ": a product of the operator is not finite.");
  if (symmetric_) {
    const double asymmetry = (H - H.mT()).norm().item<double>() / 2;
    const double noise = 10 * std::sqrt(epsilon_) * H.norm().item<double>();
    TORCH_CHECK_VALUE(asymmetry <= noise, name,
                      ": the operator is not symmetric: |H - H^T| / 2 is ", asymmetry,
                      " for a projection H of norm ", H.norm().item<double>(), "; use arnoldi.");
  }
}

void KrylovProcess::solve_densely(const at::Tensor& A) {
  const at::Tensor H = A.to(at::kCPU, at::kDouble);
  check_projection(H);
  finish(ritz_pairs(H, at::zeros({1, n_}, H.options()), symmetric_, options_.which));
}

// Also if the residuals are rounding errors and do not fall any more: each restart adds about
// epsilon to them.
bool KrylovProcess::has_converged(const RitzPairs& pairs) {
  const double unit = pairs.values.abs().max().item<double>();
  const double residual = pairs.residuals.narrow(0, 0, k_).max().item<double>();
  if (residual >= last_residual_ && residual <= kRoundingErrors * epsilon_ * unit) {
    tol_ = std::max(tol_, kRoundingErrors * epsilon_);
  }
  last_residual_ = residual;
  return residual <= tol_ * unit;
}

void KrylovProcess::restart_or_finish() {
  const at::Tensor H = space_->projection().to(at::kCPU, at::kDouble);
  const at::Tensor B = space_->coupling().to(at::kCPU, at::kDouble);
  check_projection(H);
  RitzPairs pairs = ritz_pairs(H, B, symmetric_, options_.which);
  pairs.residuals += restart_error_;
  if (has_converged(pairs) || restarts_ == options_.max_restarts) {
    finish(pairs);
    return;
  }
  ++restarts_;
  const int64_t room = space_->size() - options_.block_size - (symmetric_ ? 0 : 1);
  const int64_t kept = std::min(std::max(k_, space_->size() / 2), room);
  const RestartSpace next = restart_space(pairs, H, B, kept);
  restart_error_ += next.error;
  space_->restart(next.basis, next.projection, next.coupling);
}

void KrylovProcess::finish(const RitzPairs& pairs) {
  const at::Tensor values = pairs.values.narrow(0, 0, k_);
  const at::Tensor small = pairs.vectors.narrow(1, 0, k_);
  const at::Tensor residuals = pairs.residuals.narrow(0, 0, k_);
  const at::Tensor converged = residuals <= tol_ * pairs.values.abs().max();
  const auto on_device = [&](const at::Tensor& x) { return x.to(tensor_options_); };
  const auto combined = [&](const at::Tensor& x) {
    return solves_densely() ? on_device(x) : space_->combined(on_device(x));
  };
  const bool is_complex = values.is_complex();
  const int64_t missing = k_ - converged.sum().item<int64_t>();
  if (missing > 0) {
    TORCH_WARN(method_name(symmetric_), ": ", missing, " of ", k_,
               " eigenpairs have not converged in ", options_.max_restarts,
               " restarts; raise max_basis or max_restarts, or tol (", tol_, ").");
  }
  const at::Tensor vectors = is_complex
                                 ? at::complex(combined(at::real(small)), combined(at::imag(small)))
                                 : combined(small);
  const at::Tensor eigenvalues =
      is_complex ? at::complex(on_device(at::real(values)), on_device(at::imag(values)))
                 : on_device(values);
  result_ = {eigenvalues, vectors, on_device(residuals), converged.to(tensor_options_.device())};
  space_.reset();
}

std::vector<at::Tensor> KrylovProcess::make_result() { return result_; }

}  // namespace torchium::linalg::detail

namespace torchium::linalg {
namespace {

KrylovEigenpairs eigenpairs(bool symmetric, const LinearOperator& A, int64_t k,
                            const KrylovOptions& options) {
  detail::KrylovProcess process(symmetric, A.size(), k, options, A.options());
  const auto result = process.run(A);
  return {result[0], result[1], result[2], result[3], process.products()};
}

}  // namespace

KrylovEigenpairs lanczos(const LinearOperator& A, int64_t k, const KrylovOptions& options) {
  return eigenpairs(true, A, k, options);
}

KrylovEigenpairs arnoldi(const LinearOperator& A, int64_t k, const KrylovOptions& options) {
  return eigenpairs(false, A, k, options);
}

}  // namespace torchium::linalg
