// Algorithms that ask for products with an operator, as one torch class: schemas, no maths. See
// torchium/linalg/krylov.h and estimators.h.
#include "linalg/common/random_signs.h"
#include "linalg/estimators/hutchinson.h"
#include "linalg/estimators/lanczos_quadrature.h"
#include "linalg/estimators/sketched.h"
#include "linalg/krylov/krylov_process.h"
#include "linalg/structured/dense_product.h"
#include "ops/operator_classes.h"

#include <torch/custom_class.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace torchium::ops {
namespace {

namespace detail = linalg::detail;

template <typename Algorithm, typename... Arguments>
Process make(Arguments&&... arguments) {
  return c10::make_intrusive<OperatorProcess>(
      std::make_unique<Algorithm>(std::forward<Arguments>(arguments)...));
}

at::TensorOptions tensor_options(at::ScalarType dtype, at::Device device) {
  return at::TensorOptions(dtype).device(device);
}

Process krylov(bool symmetric, int64_t n, std::optional<int64_t> k, const std::string& which,
               std::optional<int64_t> block_size, std::optional<int64_t> max_basis,
               int64_t max_restarts, std::optional<double> tol,
               const std::optional<at::Tensor>& start, int64_t seed, bool is_dense,
               at::ScalarType dtype, at::Device device) {
  linalg::KrylovOptions options;
  options.which = which;
  options.block_size = block_size;
  options.max_basis = max_basis;
  options.max_restarts = max_restarts;
  options.tol = tol;
  options.start = start.value_or(at::Tensor());
  options.seed = static_cast<uint64_t>(seed);
  return make<detail::KrylovProcess>(symmetric, n, k, options, is_dense,
                                     tensor_options(dtype, device));
}

Process hutchinson(bool diagonal, int64_t n, int64_t num_samples, std::optional<int64_t> block_size,
                   std::optional<double> tol, int64_t seed, bool is_dense, at::ScalarType dtype,
                   at::Device device) {
  const linalg::HutchinsonOptions options{num_samples, block_size, tol,
                                          static_cast<uint64_t>(seed)};
  return make<detail::HutchinsonProcess>(diagonal, n, options, is_dense,
                                         tensor_options(dtype, device));
}

// Count: an integer, or an optional one.
template <typename Algorithm, typename Count>
Process sketched(int64_t n, Count num_products, int64_t seed, at::ScalarType dtype,
                 at::Device device) {
  return make<Algorithm>(n, num_products, static_cast<uint64_t>(seed),
                         tensor_options(dtype, device));
}

Process logdet(int64_t n, int64_t num_samples, int64_t num_steps, int64_t block_size, int64_t seed,
               at::ScalarType dtype, at::Device device) {
  const linalg::LogdetOptions options{num_samples, num_steps, block_size,
                                      static_cast<uint64_t>(seed)};
  return make<detail::LogdetProcess>(n, options, tensor_options(dtype, device));
}

at::Tensor random_signs(int64_t n, int64_t columns, int64_t seed, int64_t first_stream,
                        at::ScalarType dtype, at::Device device) {
  return detail::random_signs(n, columns, static_cast<uint64_t>(seed),
                              static_cast<uint64_t>(first_stream), tensor_options(dtype, device));
}

}  // namespace

void define_process_ops(torch::Library& m) {
  m.class_<OperatorProcess>("OperatorProcess")
      // To the end, with the result.
      .def("run", [](const Process& self, const Handle& A) { return self->algorithm->run(A->A); })
      .def("products", [](const Process& self) { return self->algorithm->products(); });
  m.def("krylov_process", &krylov);
  m.def("hutchinson_process", &hutchinson);
  m.def("hutchpp_process", &sketched<detail::HutchppProcess, int64_t>);
  m.def("xdiag_process", &sketched<detail::XdiagProcess, std::optional<int64_t>>);
  m.def("logdet_process", &logdet);
  m.def("random_signs", &random_signs);
  m.def("_dense_product(Tensor A, Tensor X) -> Tensor", &detail::dense_product);
  m.def("_symmetric_dense_product(Tensor A, Tensor X) -> Tensor", &detail::symmetric_dense_product);
}

}  // namespace torchium::ops
