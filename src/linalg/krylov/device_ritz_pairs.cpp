#include "linalg/krylov/device_ritz_pairs.h"

#include "linalg/spectral/divide_and_conquer.h"
#include "linalg/spectral/unit_scale.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <cmath>

namespace torchium::linalg::detail {

bool has_device_ritz_pairs(int64_t m, const std::string& which, const at::TensorOptions& options) {
  return options.device().is_cuda() && c10::typeMetaToScalarType(options.dtype()) == at::kFloat &&
         which != "LM" && has_divide_and_conquer(at::empty({1, m, m}, options));
}

// theta = x^T H x for the eigenvectors X of H in float32, made orthonormal to float64's errors by
// X (3 I - X^T X) / 2.
DeviceRitzPairs device_ritz_pairs(const at::Tensor& projection, int64_t k,
                                  const std::string& which) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const int64_t m = projection.size(1);
  const at::Tensor H = projection.narrow(0, 0, m);
  const at::Tensor symmetric = (H + H.mT()).mul_(0.5).to(at::kFloat);
  const UnitScaled input = unit_scaled(symmetric.unsqueeze(0));
  const auto [all, vectors] = divide_and_conquer(input.matrix);
  const bool is_largest = which == "LA";
  const at::Tensor wanted = vectors[0].narrow(1, is_largest ? m - k : 0, k).to(at::kDouble);
  const at::Tensor Y = is_largest ? wanted.flip(1) : wanted;
  const at::Tensor X = at::addmm(Y, Y, Y.mT().matmul(Y), /*beta=*/1.5, /*alpha=*/-0.5);
  const at::Tensor rest = projection.matmul(X);
  at::Tensor of_H = rest.narrow(0, 0, m);
  const at::Tensor values = (X * of_H).sum(0);
  of_H.sub_(X * values);
  const at::Tensor residuals = rest.norm(2, 0);
  const at::Tensor norms = at::stack({H, H - H.mT()}).norm(2, {1, 2});
  const at::Tensor numbers =
      at::stack({all.abs().amax().to(at::kDouble), input.exponent.to(at::kDouble).squeeze(),
                 residuals.amax(), norms[0], norms[1]});
  return {.values = values, .vectors = X, .residuals = residuals, .numbers = numbers};
}

DeviceRitzPairs::Quality DeviceRitzPairs::quality() const {
  const at::Tensor host = numbers.cpu();
  const double* number = host.const_data_ptr<double>();
  return {.largest = std::ldexp(number[0], static_cast<int>(number[1])),
          .residual = number[2],
          .norm = number[3],
          .asymmetry = number[4] / 2};
}

}  // namespace torchium::linalg::detail
