#include "linalg/estimators/lanczos_quadrature.h"

#include "linalg/common/operator_checks.h"
#include "linalg/common/precision.h"
#include "linalg/common/random_signs.h"
#include "linalg/matrix_functions/matrix_functions.h"
#include "support/no_transforms.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace torchium::linalg::detail {

LogdetProcess::LogdetProcess(int64_t n, const LogdetOptions& options,
                             const at::TensorOptions& tensor_options)
    : OperatorProcess("torchium::logdet"),
      n_(n),
      options_(options),
      tensor_options_(tensor_options) {
  check_operator("logdet", n, tensor_options);
  check_positive("logdet", "num_samples", options.num_samples);
  check_positive("logdet", "num_steps", options.num_steps);
  check_positive("logdet", "block_size", options.block_size);
  options_.num_steps = std::min(options.num_steps, n);
  begin_block();
}

void LogdetProcess::begin_block() {
  const torchium::detail::NoTransforms no_transforms;
  columns_ = std::min(options_.block_size, options_.num_samples - first_);
  step_ = 0;
  const int64_t steps = options_.num_steps;
  bases_ = at::empty({columns_, steps + 1, n_}, tensor_options_);
  projections_ = at::zeros({columns_, steps + 1, steps + 1}, tensor_options_);
  const at::Tensor signs =
      random_signs(n_, columns_, options_.seed, static_cast<uint64_t>(first_), tensor_options_);
  bases_.select(1, 0).copy_(signs.mT() / std::sqrt(static_cast<double>(n_)));
}

at::Tensor LogdetProcess::next_operand() {
  return columns_ == 0 ? at::Tensor() : bases_.select(1, step_).mT();
}

void LogdetProcess::use(const at::Tensor& /*operand*/, const at::Tensor& product) {
  at::Tensor w = in_units(product).mT().unsqueeze(2).clone();  // [columns, n, 1]
  const at::Tensor length = norms(w, 1, /*keepdim=*/true);
  const at::Tensor V = bases_.narrow(1, 0, step_ + 1);
  for (int pass = 0; pass < 2; ++pass) {
    const at::Tensor c = V.bmm(w);
    w.baddbmm_(V.mT(), c, /*beta=*/1, /*alpha=*/-1);
    projections_.select(1, step_).select(1, step_).add_(c.select(1, step_).squeeze(1));
  }
  // Where nothing is left the Krylov space is invariant. Zero vectors continue it, with eigenvalues
  // 1, whose logarithm is zero.
  const at::Tensor is_zero = (norms(bases_.select(1, step_), 1) == 0).to(w.scalar_type());
  projections_.select(1, step_).select(1, step_).add_(is_zero);
  const at::Tensor left = norms(w, 1, /*keepdim=*/true).to(w.scalar_type());
  const double noise = epsilon_of(w.scalar_type()) * std::sqrt(static_cast<double>(n_));
  const at::Tensor goes_on = left > noise * length;
  const at::Tensor beta = at::where(goes_on, left, at::zeros_like(left)).flatten();
  projections_.select(1, step_).select(1, step_ + 1).copy_(beta);
  projections_.select(1, step_ + 1).select(1, step_).copy_(beta);
  bases_.select(1, step_ + 1).copy_(at::where(goes_on, w / left, at::zeros_like(w)).squeeze(2));
  if (++step_ == options_.num_steps) {
    end_block();
  }
}

void LogdetProcess::end_block() {
  const at::Tensor T =
      projections_.narrow(1, 0, step_).narrow(2, 0, step_).to(at::kDouble).contiguous();
  const auto [theta, X] = eigh(T);
  const at::Tensor weights = X.select(1, 0).square();
  const at::Tensor logs = theta.log() + exponent() * M_LN2;
  estimate_.add((weights * logs).sum(1) * static_cast<double>(n_));
  first_ += columns_;
  columns_ = 0;
  bases_.reset();
  if (first_ < options_.num_samples) {
    begin_block();
  }
}

std::vector<at::Tensor> LogdetProcess::make_result() {
  return {estimate_.mean(), estimate_.standard_error()};
}

}  // namespace torchium::linalg::detail

namespace torchium::linalg {

StochasticEstimate logdet(const LinearOperator& A, const LogdetOptions& options) {
  detail::LogdetProcess process(A.size(), options, A.options());
  const auto result = process.run(A);
  return {result[0], result[1], process.products()};
}

}  // namespace torchium::linalg
