// log det A by stochastic Lanczos quadrature: see torchium/linalg/estimators.h.
#pragma once

#include "linalg/estimators/hutchinson.h"
#include "linalg/operators/operator_process.h"
#include <torchium/linalg/estimators.h>

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// Lanczos' method for each column of a block by itself: V_i^T A V_i = T_i, tridiagonal, for the
// Krylov space of sample i. z_i^T log(A) z_i = |z_i|^2 sum_k tau_k^2 log theta_k, with the
// eigenvalues theta of T_i and the first entries tau of its eigenvectors.
class LogdetProcess final : public OperatorProcess {
 public:
  LogdetProcess(int64_t n, const LogdetOptions& options, const at::TensorOptions& tensor_options);

 private:
  at::Tensor next_operand() override;
  void use(const at::Tensor& operand, const at::Tensor& product) override;
  std::vector<at::Tensor> make_result() override;  // value, standard error
  void begin_block();
  void end_block();

  int64_t n_;
  LogdetOptions options_;
  at::TensorOptions tensor_options_;
  int64_t first_ = 0, columns_ = 0;  // the samples of this block
  int64_t step_ = 0;
  at::Tensor bases_;        // [columns, steps + 1, n]
  at::Tensor projections_;  // [columns, steps + 1, steps + 1]: T
  RunningMean estimate_;
};

}  // namespace torchium::linalg::detail
