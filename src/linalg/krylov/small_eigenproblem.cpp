#include "linalg/krylov/small_eigenproblem.h"

#include "linalg/spectral/serial_lapack.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <complex>
#include <optional>
#include <vector>

namespace torchium::linalg::detail {
namespace {

// Large where a value is wanted.
at::Tensor priority(const at::Tensor& values, const std::string& which) {
  if (which == "LM") return values.abs();
  if (which == "LI") return at::imag(values).abs();
  const at::Tensor real = values.is_complex() ? at::real(values) : values;
  return which[0] == 'S' ? real.neg() : real;
}

// Ascending ones may be in their order, or in its reverse.
at::Tensor order_of(const at::Tensor& values, bool ascending, const std::string& which) {
  const auto indices = at::TensorOptions().dtype(at::kLong);
  const int64_t n = values.size(0);
  if (ascending && which == "SA") return at::arange(n, indices);
  if (ascending && which == "LA") return at::arange(n - 1, -1, -1, indices);
  return priority(values, which).argsort(/*stable=*/true, -1, true);
}

// The real vectors that span the same space as the first pairs, at least `least` of them.
at::Tensor real_span(const RitzPairs& pairs, int64_t least) {
  if (!pairs.values.is_complex()) {
    return pairs.vectors.narrow(1, 0, least);
  }
  std::vector<at::Tensor> columns;
  for (int64_t i = 0; i < pairs.values.size(0) && static_cast<int64_t>(columns.size()) < least;
       ++i) {
    const auto value = pairs.values[i].item<c10::complex<double>>();
    if (value.imag() < 0) continue;  // the conjugate of one that is there
    const at::Tensor x = pairs.vectors.select(1, i);
    columns.push_back(at::real(x));
    if (value.imag() > 0) {
      columns.push_back(at::imag(x));
    }
  }
  return std::get<0>(at::linalg_qr(at::stack(columns, 1)));
}

}  // namespace

RitzPairs ritz_pairs(const at::Tensor& H, const at::Tensor& B, int64_t k, bool symmetric,
                     const std::string& which) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;  // half the time of small operations
  std::optional<SerialLapack> serial;  // threads that sleep take longer to wake than to help
  if (H.size(0) <= SerialLapack::kLargestOrder) serial.emplace();
  auto [values, vectors] = symmetric ? at::linalg_eigh((H + H.mT()).mul_(0.5)) : at::linalg_eig(H);
  const at::Tensor order = order_of(values, symmetric, which);
  vectors = vectors.mT().index_select(0, order).mT();  // it has its columns one after the other
  values = values.index_select(0, order);
  const int64_t wanted = std::min(k, H.size(0));
  const at::Tensor x = vectors.narrow(1, 0, wanted);
  const at::Tensor residuals = at::cat({H, B}).to(x.scalar_type()).matmul(x);
  residuals.narrow(0, 0, H.size(0)).sub_(x * values.narrow(0, 0, wanted));
  return {values, vectors, residuals.norm(2, 0)};
}

RestartSpace restart_space(const RitzPairs& pairs, const at::Tensor& H, const at::Tensor& B,
                           int64_t least) {
  const at::Tensor U = real_span(pairs, least);
  const at::Tensor HU = H.matmul(U);
  const at::Tensor projection = U.mT().matmul(HU);
  const double error = (HU - U.matmul(projection)).norm().item<double>();
  return {U, projection, B.matmul(U), error};
}

}  // namespace torchium::linalg::detail
