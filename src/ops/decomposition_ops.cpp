// Schemas and backends of torchium/linalg/decompositions.h, and its functions, which go through the
// dispatcher: fake tensors and torch.compile see the same operators from both languages.
#include "linalg/decompositions/cholesky.h"
#include "linalg/decompositions/polar.h"
#include "linalg/decompositions/svd.h"
#include "ops/find_operator.h"
#include "ops/refuse_gradients.h"
#include <torchium/linalg/decompositions.h>

#include <torch/library.h>

#include <tuple>

namespace torchium::linalg {
namespace {

constexpr char kUseCholesky[] =
    "Call it under torch.no_grad(), detach() the argument, or use torch.linalg.cholesky.";
constexpr char kUseLogdet[] =
    "Call it under torch.no_grad(), detach() the argument, or use torch.linalg.slogdet.";
constexpr char kUseSvd[] =
    "Call it under torch.no_grad(), detach() the argument, or use torch.linalg.svd.";

}  // namespace

CholeskyFactor cholesky(const at::Tensor& A, double damping) {
  static const auto op = ops::find_operator("torchium::cholesky", &detail::cholesky);
  const auto [L, jitter] = op.call(A, damping);
  return {L, jitter};
}

at::Tensor spd_logdet(const at::Tensor& A, double damping) {
  static const auto op = ops::find_operator("torchium::spd_logdet", &detail::spd_logdet);
  return op.call(A, damping);
}

at::Tensor orthogonalize(const at::Tensor& A, std::optional<double> rcond) {
  static const auto op = ops::find_operator("torchium::orthogonalize", &detail::orthogonalize);
  return op.call(A, rcond);
}

PolarFactors polar(const at::Tensor& A, std::optional<double> rcond) {
  static const auto op = ops::find_operator("torchium::polar", &detail::polar);
  const auto [U, H] = op.call(A, rcond);
  return {U, H};
}

SingularValues svd(const at::Tensor& A) {
  static const auto op = ops::find_operator("torchium::svd", &detail::svd);
  const auto [U, S, Vh] = op.call(A);
  return {U, S, Vh};
}

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  m.def("cholesky(Tensor A, *, float damping=0.0) -> (Tensor L, Tensor jitter)");
  m.def("spd_logdet(Tensor A, *, float damping=0.0) -> Tensor");
  m.def("orthogonalize(Tensor A, *, float? rcond=None) -> Tensor");
  m.def("polar(Tensor A, *, float? rcond=None) -> (Tensor U, Tensor H)");
  m.def("svd(Tensor A) -> (Tensor U, Tensor S, Tensor Vh)");
}

TORCH_LIBRARY_IMPL(torchium, CompositeExplicitAutograd, m) {
  m.impl("cholesky", &detail::cholesky);
  m.impl("spd_logdet", &detail::spd_logdet);
  m.impl("orthogonalize", &detail::orthogonalize);
  m.impl("polar", &detail::polar);
  m.impl("svd", &detail::svd);
}

TORCH_LIBRARY_IMPL(torchium, Meta, m) {
  m.impl("cholesky", &detail::cholesky_meta);
  m.impl("spd_logdet", &detail::spd_logdet_meta);
  m.impl("orthogonalize", &detail::orthogonalize_meta);
  m.impl("polar", &detail::polar_meta);
  m.impl("svd", &detail::svd_meta);
}

TORCH_LIBRARY_IMPL(torchium, Autograd, m) {
  m.impl("cholesky", ops::refuse_gradients_kernel<kUseCholesky>());
  m.impl("spd_logdet", ops::refuse_gradients_kernel<kUseLogdet>());
  m.impl("orthogonalize", ops::refuse_gradients_kernel<kUseSvd>());
  m.impl("polar", ops::refuse_gradients_kernel<kUseSvd>());
  m.impl("svd", ops::refuse_gradients_kernel<kUseSvd>());
}

}  // namespace torchium::linalg
