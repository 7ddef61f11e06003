// Conjugate gradients and GMRES: see torchium/linalg/solvers.h.
#include "linalg/spectral/unit_scale.h"
#include "linalg/structured/iterative/column_krylov.h"
#include "linalg/structured/iterative/solver_checks.h"
#include "linalg/structured/operator_node.h"
#include "support/derivatives.h"
#include "support/no_autocast.h"
#include "support/phase.h"
#include "support/warn.h"
#include <torchium/linalg/solvers.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

namespace torchium::linalg {
namespace {

constexpr int64_t kIterationsPerTest = 10;

// A system with true residuals; a method corrects X until they are small. Columns of B are solved
// in units of their largest entry, because their squares may be out of range.
class LinearSystem {
 public:
  LinearSystem(const char* function, const LinearOperator& A, const at::Tensor& B,
               const SolverOptions& options);

  // X by cycles of `correct(B - A X)`, which returns a correction and counts its iterations.
  // `longer_may_be_better`: a first cycle may lower the error and raise the residual.
  template <typename Correct>
  SolveResult solve(bool longer_may_be_better, const Correct& correct);
  // X with its derivative in reverse mode; `solve_transposed(G)` is A^-T G.
  template <typename Solve>
  at::Tensor with_derivative(const at::Tensor& X, const Solve& solve_transposed) const;

  at::Tensor multiply(const at::Tensor& X) const {
    at::Tensor product = A_.matmul(X);
    TORCH_CHECK_VALUE(!torchium::detail::is_batched(product), function_,
                      ": A is batched by torch.vmap; solve with one matrix after the other.");
    return product;
  }
  at::Tensor precondition(const at::Tensor& X) const {
    return options_.preconditioner ? options_.preconditioner->matmul(X) : X;
  }
  const char* or_preconditioner() const {
    return options_.preconditioner ? ", or preconditioner is not" : "";
  }
  int64_t iterations_left() const { return options_.max_iterations - iterations_; }
  void count(int64_t iterations) { iterations_ += iterations; }
  const at::Tensor& goals() const { return goals_; }

 private:
  at::Tensor residual(const at::Tensor& X, bool has_grad_mode);

  const char* function_;
  const LinearOperator& A_;
  const at::Tensor& given_;  // B
  const SolverOptions& options_;
  detail::UnitScaled columns_;  // of B, [m, 1, n]
  at::Tensor B_;                // [n, m], scaled
  bool is_vector_;
  double tol_;
  at::Tensor goals_;  // [m] float64: tol |b|
  int64_t iterations_ = 0;
  bool A_has_derivative_ = false;
};

LinearSystem::LinearSystem(const char* function, const LinearOperator& A, const at::Tensor& B,
                           const SolverOptions& options)
    : function_(function), A_(A), given_(B), options_(options) {
  detail::check_solver(function, options.tol, options.max_iterations);
  TORCH_CHECK_VALUE(A.node().batch.empty(), function, ": A is ", at::IntArrayRef(A.sizes()),
                    "; it must be a single matrix.");
  TORCH_CHECK_VALUE(B.defined() && (B.dim() == 1 || B.dim() == 2) && B.size(0) == A.size(),
                    function, ": B is ", B.defined() ? at::str(B.sizes()) : "undefined",
                    "; it must be a vector or a matrix with ", A.size(), " rows.");
  TORCH_CHECK_VALUE(B.layout() == at::kStrided, function, ": B has layout ", B.layout(),
                    "; pass a dense tensor, B.to_dense().");
  TORCH_CHECK_VALUE(B.dtype() == A.options().dtype() && B.device() == A.options().device(),
                    function, ": B is ", B.scalar_type(), " on ", B.device(), ", A is ",
                    at::typeMetaToScalarType(A.options().dtype()), " on ", A.options().device(),
                    "; they must be equal.");
  TORCH_CHECK_VALUE(!torchium::detail::has_any_tangent(B), function,
                    ": B has a tangent, but the method has no derivative in forward mode. Use "
                    "B.detach().");
  TORCH_CHECK_VALUE(!torchium::detail::is_batched(B), function,
                    ": B is batched by torch.vmap; pass all vectors as columns of one B.");
  if (options.preconditioner) {
    TORCH_CHECK_VALUE(options.preconditioner->sizes() == A.sizes(), function,
                      ": preconditioner is ", at::IntArrayRef(options.preconditioner->sizes()),
                      "; it must be of the shape of A, ", at::IntArrayRef(A.sizes()), ".");
    const auto& given = options.preconditioner->options();
    TORCH_CHECK_VALUE(given.dtype() == B.dtype() && given.device() == B.device(), function,
                      ": preconditioner is ", at::typeMetaToScalarType(given.dtype()), " on ",
                      given.device(), ", A is ", B.scalar_type(), " on ", B.device(),
                      "; they must be equal.");
  }
  is_vector_ = B.dim() == 1;
  columns_ = detail::unit_scaled((is_vector_ ? B.unsqueeze(1) : B).detach().mT().unsqueeze(1));
  B_ = columns_.matrix.squeeze(1).mT();
  tol_ = detail::tolerance(options.tol, B.scalar_type());
  goals_ = tol_ * detail::norms(B_, 0);
}

// B - A X, in units of the columns. The product shows whether A requires grad.
at::Tensor LinearSystem::residual(const at::Tensor& X, bool has_grad_mode) {
  const at::AutoGradMode grad_mode(has_grad_mode);
  const at::Tensor R = B_ - A_.matmul(X);
  TORCH_CHECK_VALUE(!torchium::detail::has_any_tangent(R), function_,
                    ": A is made of tensors with tangents, but the method has no derivative in "
                    "forward mode. Detach them.");
  A_has_derivative_ = torchium::detail::requires_grad(R);
  return R.detach();
}

// Calls `hook` with the gradients of a tensor, at each level where it has a graph.
template <typename Hook>
void add_hook(const at::Tensor& tensor, const Hook& hook) {
  for (const at::Tensor& level : torchium::detail::levels_of(tensor)) {
    if (level.requires_grad()) {
      level.register_hook(hook);
    }
  }
}

// X = X_0 + A^-1 (B - A X_0) has the first derivatives of A and B, and at X_0 the value X_0.
template <typename Solve>
at::Tensor LinearSystem::with_derivative(const at::Tensor& X, const Solve& solve_transposed) const {
  if (!A_has_derivative_ && !torchium::detail::is_differentiated(given_)) {
    return X;
  }
  const at::Tensor residual = given_ - A_.matmul(X);
  const at::Tensor zero = residual - residual.detach();
  add_hook(zero, [=, function = function_, once = A_has_derivative_](const at::Tensor& G) {
    const at::Tensor gradient = G.defined() ? solve_transposed(G) : G;
    if (once && gradient.defined()) {  // X_0 counts as constant
      add_hook(gradient, [=](const at::Tensor&) -> at::Tensor {
        TORCH_CHECK(false, function,
                    " can be differentiated once only if A requires grad. For second "
                    "derivatives use torch.linalg.solve.");
      });
    }
    return gradient;
  });
  return X + zero;
}

template <typename Correct>
SolveResult LinearSystem::solve(bool longer_may_be_better, const Correct& correct) {
  const bool has_grad_mode = c10::GradMode::is_enabled();
  const c10::NoGradGuard no_grad;
  const torchium::detail::NoAutocast no_autocast;
  at::Tensor X = at::zeros_like(B_), R = B_;
  at::Tensor residuals = detail::norms(R, 0), converged = residuals <= goals_;
  bool progresses = true;
  while (progresses && iterations_left() > 0 && !converged.all().item<bool>()) {
    const bool is_first = iterations_ == 0;
    const at::Tensor corrected = X + correct(R);
    R = residual(corrected, has_grad_mode);
    // A cycle in which rounding errors make a column worse does not count for it.
    const at::Tensor lengths = detail::norms(R, 0);
    const at::Tensor is_better =
        is_first && longer_may_be_better ? lengths.isfinite() : lengths < residuals;
    // Rounding errors, or a singular matrix, stop the progress of a column.
    progresses =
        lengths.lt(0.9 * residuals).logical_and(converged.logical_not()).any().item<bool>();
    X = at::where(is_better, corrected, X);
    residuals = at::where(is_better, lengths, residuals);
    converged = residuals <= goals_;
    if (!is_better.all().item<bool>()) {
      R = at::where(is_better, R, B_ - A_.matmul(X));
    }
  }
  if (iterations_ == 0 && B_.numel() > 0) {  // zeros have shown nothing of A
    residual(X, has_grad_mode);
  }
  const at::Tensor finite = columns_.finite.flatten(), exponents = columns_.exponent.flatten();
  converged = converged.logical_and(finite);
  X = columns_.or_nan(detail::times_power_of_two(X, exponents).mT().unsqueeze(1)).squeeze(1).mT();
  residuals = detail::times_power_of_two(residuals, exponents)
                  .masked_fill(finite.logical_not(), std::numeric_limits<double>::quiet_NaN());
  const int64_t missing = converged.logical_not().sum().item<int64_t>();
  if (missing > 0) {
    torchium::detail::warn(function_, ": ", missing, " of ", B_.size(1),
                           " columns have not converged to tol = ", tol_, " after ", iterations_,
                           " iterations. Raise max_iterations or tol, or pass a preconditioner.");
  }
  const auto shaped = [&](const at::Tensor& x) { return is_vector_ ? x.squeeze(-1) : x; };
  return {shaped(X), shaped(residuals), shaped(converged), iterations_};
}

// Sums of products over rows: [1, m].
at::Tensor column_products(const at::Tensor& X, const at::Tensor& Y) {
  return (X * Y).sum(0, /*keepdim=*/true);
}

// A^-1 R, each column until its recursive residual is below its goal.
at::Tensor conjugate_gradients(LinearSystem& system, at::Tensor R) {
  at::Tensor X = at::zeros_like(R), Z = system.precondition(R), P = Z, rho = column_products(R, Z);
  at::Tensor is_active = (detail::norms(R, 0) > system.goals()).unsqueeze(0);
  at::Tensor is_indefinite = at::zeros_like(is_active);
  const int64_t most = system.iterations_left();
  const int64_t period = R.is_cuda() ? kIterationsPerTest : 1;  // the host waits for a GPU
  for (int64_t i = 1; i <= most; ++i) {
    const at::Tensor Q = system.multiply(P);
    const at::Tensor curvature = column_products(P, Q);
    is_indefinite = is_indefinite.logical_or(is_active.logical_and(curvature <= 0));
    const at::Tensor step = at::where(is_active, rho / curvature, at::zeros_like(rho));
    X = X + step * P;
    R = R - step * Q;
    is_active = is_active.logical_and(detail::norms(R, 0).unsqueeze(0) > system.goals());
    Z = system.precondition(R);
    const at::Tensor next = column_products(R, Z);
    P = Z + at::where(is_active, next / rho, at::zeros_like(rho)) * P;
    rho = next;
    system.count(1);
    if (i % period == 0 || i == most) {
      TORCH_CHECK_VALUE(!is_indefinite.any().item<bool>(), "cg: A is not positive definite",
                        system.or_preconditioner(), ": x^T A x <= 0 was met. Use gmres.");
      if (!is_active.any().item<bool>()) {
        break;
      }
    }
  }
  return X;
}

// The correction of one cycle of GMRES: P V y with the y that minimises |R - A P V y|.
at::Tensor gmres_cycle(LinearSystem& system, const at::Tensor& R, int64_t restart) {
  const int64_t most = std::min({restart, system.iterations_left(), R.size(0)});
  detail::ColumnKrylov space(
      [&](const at::Tensor& V) { return system.multiply(system.precondition(V)); }, R, most);
  const at::Tensor goals = system.goals().cpu();
  const at::Tensor lengths = space.lengths().cpu();
  at::Tensor y;
  while (space.steps() < most) {
    const int64_t steps = std::min(kIterationsPerTest, most - space.steps());
    for (int64_t i = 0; i < steps; ++i) {
      space.step();
    }
    system.count(steps);
    const at::Tensor H = space.projections().cpu();
    TORCH_CHECK_VALUE(H.isfinite().all().item<bool>(),
                      "gmres: a product of the operator is not finite.");
    at::Tensor target = at::zeros({H.size(0), H.size(1), 1}, H.options());
    target.select(1, 0).copy_(lengths.squeeze(2));
    // gelsd: invariant spaces make H singular.
    y = std::get<0>(at::linalg_lstsq(H, target, std::nullopt, "gelsd"));
    const at::Tensor residuals = detail::norms(target - H.bmm(y), 1).squeeze(1);
    if (residuals.le(goals).all().item<bool>()) {
      break;
    }
  }
  return system.precondition(space.combine(y.to(R.device())));
}

}  // namespace

SolveResult cg(const LinearOperator& A, const at::Tensor& B, const SolverOptions& options) {
  const torchium::detail::Phase phase("torchium::cg");
  LinearSystem system("cg", A, B, options);
  // The error falls in the norm of A.
  SolveResult found = system.solve(/*longer_may_be_better=*/true, [&](const at::Tensor& R) {
    return conjugate_gradients(system, R);
  });
  found.solution = system.with_derivative(
      found.solution, [=](const at::Tensor& G) { return cg(A, G, options).solution; });
  return found;
}

SolveResult gmres(const LinearOperator& A, const at::Tensor& B, const SolverOptions& options,
                  int64_t restart) {
  const torchium::detail::Phase phase("torchium::gmres");
  detail::check_positive("gmres", "restart", restart);
  LinearSystem system("gmres", A, B, options);
  SolveResult found = system.solve(/*longer_may_be_better=*/false, [&](const at::Tensor& R) {
    return gmres_cycle(system, R, restart);
  });
  found.solution = system.with_derivative(found.solution, [=](const at::Tensor& G) {
    SolverOptions transposed = options;
    if (options.preconditioner) {
      transposed.preconditioner = options.preconditioner->transpose();
    }
    return gmres(A.transpose(), G, transposed, restart).solution;
  });
  return found;
}

}  // namespace torchium::linalg
