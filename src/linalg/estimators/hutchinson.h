// Estimates from products with random signs: see torchium/linalg/estimators.h.
#pragma once

#include "linalg/operators/operator_process.h"
#include <torchium/linalg/estimators.h>

#include <ATen/core/Tensor.h>

namespace torchium::linalg::detail {

// Mean and variance of samples that come in batches (Chan, Golub and LeVeque 1979).
class RunningMean {
 public:
  void add(const at::Tensor& samples);  // [..., samples]
  int64_t count() const { return count_; }
  const at::Tensor& mean() const { return mean_; }
  at::Tensor standard_error() const;

 private:
  int64_t count_ = 0;
  at::Tensor mean_, squares_;  // squares_: the sum of squared deviations, float64
};

class HutchinsonProcess final : public OperatorProcess {
 public:
  HutchinsonProcess(bool diagonal, int64_t n, const HutchinsonOptions& options, bool is_dense,
                    const at::TensorOptions& tensor_options);

  LinearOperator prepared(const LinearOperator& A) const override;

 private:
  at::Tensor next_operand() override;
  void use(const at::Tensor& operand, const at::Tensor& product) override;
  std::vector<at::Tensor> make_result() override;  // value, standard error
  bool is_accurate() const;

  bool diagonal_;
  int64_t n_;
  HutchinsonOptions options_;
  int64_t block_;
  int64_t calls_per_test_;
  at::TensorOptions tensor_options_;
  RunningMean estimate_;
  int64_t calls_ = 0;
  bool done_ = false;
};

}  // namespace torchium::linalg::detail
