// Schemas and backends of torchium/linalg/decompositions.h, and its functions, which go through the
// dispatcher: fake tensors and torch.compile see the same operators from both languages.
#include "linalg/decompositions/cholesky.h"
#include "linalg/decompositions/polar.h"
#include "linalg/decompositions/svd.h"
#include "ops/find_operator.h"
#include "ops/refuse_gradients.h"
#include "ops/registration.h"
#include <torchium/linalg/decompositions.h>

#include <torch/library.h>

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
  const auto [L, jitter] = ops::call_operator<&detail::cholesky>("cholesky", A, damping);
  return {L, jitter};
}

at::Tensor spd_logdet(const at::Tensor& A, double damping) {
  return ops::call_operator<&detail::spd_logdet>("spd_logdet", A, damping);
}

at::Tensor orthogonalize(const at::Tensor& A, std::optional<double> rcond) {
  return ops::call_operator<&detail::orthogonalize>("orthogonalize", A, rcond);
}

PolarFactors polar(const at::Tensor& A, std::optional<double> rcond) {
  const auto [U, H] = ops::call_operator<&detail::polar>("polar", A, rcond);
  return {U, H};
}

SingularValues svd(const at::Tensor& A) {
  const auto [U, S, Vh] = ops::call_operator<&detail::svd>("svd", A);
  return {U, S, Vh};
}

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  using ops::define;
  define(m, "cholesky(Tensor A, *, float damping=0.0) -> (Tensor L, Tensor jitter)",
         &detail::cholesky, &detail::cholesky_meta, ops::refuse_gradients_kernel<kUseCholesky>());
  define(m, "spd_logdet(Tensor A, *, float damping=0.0) -> Tensor", &detail::spd_logdet,
         &detail::spd_logdet_meta, ops::refuse_gradients_kernel<kUseLogdet>());
  define(m, "orthogonalize(Tensor A, *, float? rcond=None) -> Tensor", &detail::orthogonalize,
         &detail::orthogonalize_meta, ops::refuse_gradients_kernel<kUseSvd>());
  define(m, "polar(Tensor A, *, float? rcond=None) -> (Tensor U, Tensor H)", &detail::polar,
         &detail::polar_meta, ops::refuse_gradients_kernel<kUseSvd>());
  define(m, "svd(Tensor A) -> (Tensor U, Tensor S, Tensor Vh)", &detail::svd, &detail::svd_meta,
         ops::refuse_gradients_kernel<kUseSvd>());
}

}  // namespace torchium::linalg
