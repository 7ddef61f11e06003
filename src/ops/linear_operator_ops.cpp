// LinearOperator as a torch class: schemas, no maths. See torchium/linalg/linear_operator.h.
//
// A matrix that Python knows by its products is the operator of a number; `operator_product`, which
// Python implements, multiplies by it. So this library needs no Python.
#include "linalg/operators/parameter_derivatives.h"
#include "ops/find_operator.h"
#include "ops/operator_classes.h"
#include <torchium/linalg/linear_operator.h>
#include <torchium/linalg/solvers.h>
#include <torchium/linalg/structured_operators.h>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace torchium::ops {
namespace {

Handle handle_of(linalg::LinearOperator A) {
  return c10::make_intrusive<OperatorHandle>(std::move(A));
}

std::vector<linalg::LinearOperator> operators_of(const c10::List<Handle>& handles) {
  std::vector<linalg::LinearOperator> operators;
  for (const Handle& handle : handles.vec()) {
    operators.push_back(handle->A);
  }
  return operators;
}

linalg::LinearOperator::Product python_product(int64_t number, bool transposed) {
  return [=](const at::Tensor& X) {
    static const auto op =
        find_operator<at::Tensor(int64_t, bool, const at::Tensor&)>("operator_product");
    return op.call(number, transposed, X);
  };
}

Handle callable_operator(int64_t n, int64_t number, bool has_transpose, at::ScalarType dtype,
                         at::Device device) {
  return handle_of({n, python_product(number, false), at::TensorOptions(dtype).device(device),
                    has_transpose ? python_product(number, true) : nullptr});
}

linalg::IterationOptions iteration(std::optional<double> tol, int64_t max_iterations) {
  return {tol, max_iterations};
}

linalg::EstimateOptions estimate(std::optional<int64_t> num_samples, int64_t seed) {
  return {num_samples, static_cast<uint64_t>(seed)};
}

// Methods of LinearOperator with the arguments of Python.
template <auto method>
Handle image(const Handle& self, std::optional<double> tol, int64_t max_iterations) {
  return handle_of((self->A.*method)(iteration(tol, max_iterations)));
}
template <auto method>
auto estimated(const Handle& self, std::optional<int64_t> num_samples, int64_t seed) {
  return (self->A.*method)(estimate(num_samples, seed));
}

// Product, Sum and the like.
template <typename Composite>
Handle composite_operator(const c10::List<Handle>& parts) {
  return handle_of(Composite(operators_of(parts)));
}

// A as a matrix whose products keep the functions alive that Python has stored in `owner`: the
// derivative of a solution multiplies by them.
linalg::LinearOperator with_owner(const linalg::LinearOperator& A, const at::Tensor& owner) {
  const auto product_by = [owner](linalg::LinearOperator matrix) {
    return [owner, matrix = std::move(matrix)](const at::Tensor& X) { return matrix.matmul(X); };
  };
  return {A.size(), product_by(A), A.options(), product_by(A.transpose())};
}

using Solution = std::tuple<at::Tensor, at::Tensor, at::Tensor, int64_t>;

Solution solve_iteratively(const Handle& A, const at::Tensor& B, std::optional<double> tol,
                           int64_t max_iterations, const std::optional<Handle>& preconditioner,
                           std::optional<int64_t> restart, const std::optional<at::Tensor>& owner) {
  linalg::SolverOptions options;
  options.tol = tol;
  options.max_iterations = max_iterations;
  if (preconditioner) {
    options.preconditioner = (*preconditioner)->A;
  }
  const linalg::LinearOperator matrix = owner ? with_owner(A->A, *owner) : A->A;
  const auto found =
      restart ? linalg::gmres(matrix, B, options, *restart) : linalg::cg(matrix, B, options);
  return {found.solution, found.residual_norms, found.converged, found.iterations};
}

// Boxed kernel: torch.vmap can make no batch of operators.
void refuse_vmap(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_VALUE(
      false, op.schema().name(),
      " has no batching rule for torch.vmap. Make one "
      "operator of the whole batch, Dense(A) with A [..., n, n], or call the function "
      "for one matrix after the other.");
}

}  // namespace

TORCH_LIBRARY_IMPL(torchium, FuncTorchBatched, m) {
  for (const char* name :
       {"dense_operator", "diagonal_operator", "triangular_operator", "permutation_operator",
        "convolution_operator", "sparse_operator", "low_rank_plus_diagonal_operator"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_vmap>());
  }
}

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  using Tensor = at::Tensor;
  using Number = std::optional<double>;
  using Operator = linalg::LinearOperator;
  m.class_<OperatorHandle>("LinearOperator")
      .def("kind", [](const Handle& self) { return self->A.kind(); })
      .def("sizes", [](const Handle& self) { return self->A.sizes(); })
      // An empty tensor of the operator's dtype and device.
      .def("empty", [](const Handle& self) { return at::empty({0}, self->A.options()); })
      .def("is_symmetric", [](const Handle& self) { return self->A.is_symmetric(); })
      .def("matmul", [](const Handle& self, const Tensor& X) { return self->A.matmul(X); })
      .def("rmatmul", [](const Handle& self, const Tensor& X) { return self->A.rmatmul(X); })
      .def("to_dense", [](const Handle& self) { return self->A.to_dense(); })
      .def("transpose", [](const Handle& self) { return handle_of(self->A.transpose()); })
      .def("assume",
           [](const Handle& self, const std::string& property) {
             return handle_of(self->A.assume(property));
           })
      .def("add",
           [](const Handle& self, const Handle& other) { return handle_of(self->A + other->A); })
      .def("scale", [](const Handle& self, double c) { return handle_of(c * self->A); })
      .def("inverse", &image<&Operator::inverse>)
      .def("solve",
           [](const Handle& self, const Tensor& X, Number tol, int64_t max_iterations) {
             return self->A.solve(X, iteration(tol, max_iterations));
           })
      .def("exp", &image<&Operator::exp>)
      .def("sqrt", &image<&Operator::sqrt>)
      .def("pow",
           [](const Handle& self, double exponent, Number tol, int64_t max_iterations) {
             return handle_of(self->A.pow(exponent, iteration(tol, max_iterations)));
           })
      .def("diag", &estimated<&Operator::diag>)
      .def("trace", &estimated<&Operator::trace>)
      .def("slogdet", &estimated<&Operator::slogdet>)
      .def("logdet", &estimated<&Operator::logdet>)
      .def("det", &estimated<&Operator::det>)
      .def("eigs", [](const Handle& self, std::optional<int64_t> k,
                      const std::string& which) { return self->A.eigs(k, which); })
      .def("solve_iteratively", &solve_iteratively);
  define_process_ops(m);
  m.def("check_params", [](const std::string& function, const std::vector<Tensor>& params) {
    linalg::detail::check_params(function.c_str(), params);
  });
  m.def("hvp_operator", [](const Tensor& loss, const std::vector<Tensor>& params) {
    const at::AutoGradMode enable_grad(true);
    return handle_of(linalg::detail::hvp_operator(loss, params));
  });
  m.def("fisher_operator", [](const Tensor& losses, const Tensor& outputs,
                              const std::vector<Tensor>& params, const std::string& fisher) {
    const at::AutoGradMode enable_grad(true);
    return handle_of(linalg::detail::fisher_operator({losses, outputs}, params, fisher));
  });
  m.def("warn(str message) -> ()");  // implemented in Python
  m.def("operator_product(int number, bool transposed, Tensor X) -> Tensor");
  // Functions of Python see the tensors of transforms that they were made in.
  for (const auto key :
       {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchGradWrapper,
        c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchVmapMode}) {
    m.impl("operator_product", torch::dispatch(key, torch::CppFunction::makeFallthrough()));
  }
  m.def("callable_operator", &callable_operator);
  m.def("dense_operator", [](const Tensor& A) { return handle_of(linalg::Dense(A)); });
  m.def("diagonal_operator", [](const Tensor& d) { return handle_of(linalg::Diagonal(d)); });
  m.def("identity_operator", [](int64_t n, double scale, at::ScalarType dtype, at::Device device) {
    return handle_of(linalg::Identity(n, scale, at::TensorOptions(dtype).device(device)));
  });
  m.def("triangular_operator",
        [](const Tensor& A, bool lower) { return handle_of(linalg::Triangular(A, lower)); });
  m.def("permutation_operator", [](const Tensor& perm, at::ScalarType dtype) {
    return handle_of(linalg::Permutation(perm, dtype));
  });
  m.def("convolution_operator",
        [](const Tensor& kernel, const std::optional<std::vector<int64_t>>& shape) {
          return handle_of(linalg::Convolution(kernel, shape));
        });
  m.def("sparse_operator", [](const Tensor& A) { return handle_of(linalg::Sparse(A)); });
  m.def("product_operator", &composite_operator<linalg::Product>);
  m.def("sum_operator", &composite_operator<linalg::Sum>);
  m.def("kronecker_operator", &composite_operator<linalg::Kronecker>);
  m.def("block_diag_operator", &composite_operator<linalg::BlockDiag>);
  m.def("low_rank_plus_diagonal_operator",
        [](const Tensor& d, const Tensor& U, const std::optional<Tensor>& V) {
          return handle_of(linalg::LowRankPlusDiagonal(d, U, V));
        });
}

}  // namespace torchium::ops
