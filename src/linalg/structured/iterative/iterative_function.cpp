#include "linalg/structured/iterative/iterative_function.h"

#include "linalg/common/operator_checks.h"
#include "linalg/structured/iterative/column_krylov.h"
#include "linalg/structured/iterative/function_of_values.h"
#include "linalg/structured/iterative/solver_checks.h"
#include "support/derivatives.h"
#include "support/warn.h"
#include <torchium/linalg/solvers.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace torchium::linalg::detail {
namespace {

void check_no_gradient(const LinearOperator& A, const char* function, const at::Tensor& X) {
  if (!c10::GradMode::is_enabled()) {
    return;
  }
  TORCH_CHECK_VALUE(
      !torchium::detail::requires_grad(X), A.node().kind, ".", function,
      ": X requires grad, but iterative methods are not differentiable, except for cg "
      "and gmres. Use torch.no_grad(), or X.detach().");
  const at::Tensor image = A.matmul(at::zeros({A.size(), 1}, A.options()));
  TORCH_CHECK_VALUE(
      !torchium::detail::requires_grad(image), A.node().kind, ".", function,
      ": the operator is made of tensors that require grad, but iterative methods are not "
      "differentiable, except for cg and gmres. Use torch.no_grad(), or detach them.");
}

// As one matrix of columns.
template <typename Function>
at::Tensor iterate_on_columns(const at::Tensor& X, const Function& f) {
  const at::Tensor rows_first = X.movedim(-2, 0);
  return f(rows_first.flatten(1)).reshape(rows_first.sizes()).movedim(0, -2);
}

class IterativeInverse final : public NodeOf<IterativeInverse> {
 public:
  IterativeInverse(const LinearOperator& A, const IterationOptions& iteration)
      : NodeOf("Inverse", A.node().batch, A.size(), A.options()),
        A_(A),
        iteration_(iteration),
        by_cg_(property_of(A) == Property::kPositiveDefinite) {}

  at::Tensor multiply(const at::Tensor& X) const override {
    check_no_gradient(A_, "inverse", X);
    SolverOptions options;
    options.tol = iteration_.tol;
    options.max_iterations = iteration_.max_iterations;
    return iterate_on_columns(X, [&](const at::Tensor& B) {
      return (by_cg_ ? cg(A_, B, options) : gmres(A_, B, options)).solution;
    });
  }

  LinearOperator transpose() const override {
    return make_operator<IterativeInverse>(A_.transpose(), iteration_);
  }

  bool is_symmetric() const override { return A_.is_symmetric(); }

  std::optional<Slogdet> slogdet(const EstimateOptions& estimate) const override {
    const Slogdet found = slogdet_of(A_, estimate);
    return Slogdet{found.sign, -found.logabsdet};
  }

  std::optional<LinearOperator> apply(const MatrixFunction& f) const override {
    return f.is_positive_integer_power() ? std::nullopt : apply_to_inverse(A_, f);
  }

 private:
  LinearOperator A_;
  IterationOptions iteration_;
  bool by_cg_;
};

class KrylovFunction final : public NodeOf<KrylovFunction> {
 public:
  KrylovFunction(const LinearOperator& A, const MatrixFunction& f)
      : NodeOf("MatrixFunction", A.node().batch, A.size(), A.options()), A_(A), f_(f) {}

  at::Tensor multiply(const at::Tensor& X) const override {
    check_no_gradient(A_, f_.name, X);
    return iterate_on_columns(X, [&](const at::Tensor& B) { return image_of(B); });
  }

  LinearOperator transpose() const override {
    return make_operator<KrylovFunction>(A_.transpose(), f_);
  }

  bool is_symmetric() const override { return A_.is_symmetric(); }

 private:
  at::Tensor image_of(const at::Tensor& B) const;
  // f(H) e_1 [m, steps, 1] for H of the space.
  at::Tensor coefficients(const ColumnKrylov& space) const;

  LinearOperator A_;
  MatrixFunction f_;
};

at::Tensor KrylovFunction::coefficients(const ColumnKrylov& space) const {
  const int64_t s = space.steps();
  at::Tensor H = space.projections().narrow(1, 0, s).contiguous();
  if (A_.is_symmetric()) {
    H = (H + H.mT()) / 2;
  }
  // Zero vectors, which continue an invariant space, have eigenvalues 1: every f is defined there.
  // The first vector is no zero vector, even if A maps it to zero, unless B is.
  at::Tensor is_zero = H.abs().sum(1).eq(0).logical_and(H.abs().sum(2).eq(0));
  is_zero.select(1, 0).logical_and_(space.lengths().flatten().eq(0));
  H = H + at::diag_embed(is_zero.to(H.scalar_type()));
  // The small problems are faster on the host.
  return function_of_dense(A_.node().kind, f_, H.cpu(), A_.is_symmetric())
      .narrow(2, 0, 1)
      .to(options.device());
}

at::Tensor KrylovFunction::image_of(const at::Tensor& B) const {
  constexpr int64_t kStepsPerTest = 10, kMostSteps = 200;
  const c10::NoGradGuard no_grad;
  const double tol = tolerance(f_.iteration.tol, B.scalar_type());
  const int64_t most = std::min({n, kMostSteps, f_.iteration.max_iterations});
  ColumnKrylov space([&](const at::Tensor& X) { return A_.matmul(X); }, B, most);
  at::Tensor before, y, change;
  while (space.steps() < most) {
    const int64_t steps = std::min(kStepsPerTest, most - space.steps());
    for (int64_t i = 0; i < steps; ++i) {
      space.step();
    }
    y = coefficients(space);
    if (before.defined()) {
      const at::Tensor padded = at::constant_pad_nd(before, {0, 0, 0, y.size(1) - before.size(1)});
      change = (norms(y - padded, 1) / norms(y, 1)).max();
      if (change.item<double>() <= tol) {
        break;
      }
    }
    before = y;
  }
  if (space.steps() == most && most < n) {
    const double last = change.defined() ? change.item<double>() : 1.0;
    if (last > tol) {
      torchium::detail::warn(A_.node().kind, ".", f_.name, ": after ", most,
                             " iterations the result still changes by ", last,
                             " of its norm, more than tol = ", tol,
                             ". Raise max_iterations (at most ", kMostSteps, ") or tol.");
    }
  }
  const at::Tensor image = space.combine(y * space.lengths());
  TORCH_CHECK_VALUE(!torchium::detail::has_any_tangent(image), A_.node().kind, ".", f_.name,
                    ": X or a tensor that the operator is made of has a tangent, but iterative "
                    "methods are not differentiable. Detach it.");
  return image;
}

}  // namespace

void check_iteration(const char* function, const IterationOptions& options) {
  check_solver(function, options.tol, options.max_iterations);
}

LinearOperator make_iterative_inverse(const LinearOperator& A, const IterationOptions& options) {
  TORCH_CHECK_VALUE(A.node().batch.empty(), A.node().kind,
                    ".inverse: iterative methods take single matrices, not ",
                    at::IntArrayRef(A.sizes()), ".");
  return make_operator<IterativeInverse>(A, options);
}

LinearOperator make_krylov_function(const LinearOperator& A, const MatrixFunction& f) {
  TORCH_CHECK_VALUE(A.node().batch.empty(), A.node().kind, ".", f.name,
                    ": iterative methods take single matrices, not ", at::IntArrayRef(A.sizes()),
                    ".");
  return make_operator<KrylovFunction>(A, f);
}

}  // namespace torchium::linalg::detail
