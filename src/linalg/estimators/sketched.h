// Estimates that are exact on the range of a sketch: see torchium/linalg/estimators.h.
#pragma once

#include "linalg/operators/operator_process.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace torchium::linalg::detail {

// tr A = tr(Q^T A Q) + tr((I - Q Q^T) A (I - Q Q^T)) for the range Q of A S.
class HutchppProcess final : public OperatorProcess {
 public:
  HutchppProcess(int64_t n, int64_t num_products, uint64_t seed, const at::TensorOptions& options);

 private:
  at::Tensor next_operand() override;
  void use(const at::Tensor& operand, const at::Tensor& product) override;
  std::vector<at::Tensor> make_result() override { return result_; }  // value, standard error

  int64_t n_, sketch_, samples_;
  uint64_t seed_;
  at::TensorOptions options_;
  at::Tensor range_and_samples_;  // Q, and samples (I - Q Q^T) G
  std::vector<at::Tensor> result_;
};

// diag A for a symmetric A, leaving one sample out of the range in turn.
class XdiagProcess final : public OperatorProcess {
 public:
  XdiagProcess(int64_t n, std::optional<int64_t> num_products, uint64_t seed,
               const at::TensorOptions& options);

 private:
  at::Tensor next_operand() override;
  void use(const at::Tensor& operand, const at::Tensor& product) override;
  std::vector<at::Tensor> make_result() override { return result_; }  // value, standard error

  at::Tensor identity_;   // instead of all others, where there are n products
  at::Tensor signs_;      // Omega [n, samples]
  at::Tensor images_;     // Y = A Omega
  at::Tensor range_, R_;  // Y = Q R
  std::vector<at::Tensor> result_;
};

}  // namespace torchium::linalg::detail
