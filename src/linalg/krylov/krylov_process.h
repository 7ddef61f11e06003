// The methods of Lanczos and Arnoldi with thick restarts: see torchium/linalg/krylov.h.
#pragma once

#include "linalg/krylov/krylov_space.h"
#include "linalg/krylov/small_eigenproblem.h"
#include "linalg/operators/operator_process.h"
#include <torchium/linalg/krylov.h>

#include <limits>
#include <memory>

namespace torchium::linalg::detail {

class KrylovProcess final : public OperatorProcess {
 public:
  KrylovProcess(bool symmetric, int64_t n, int64_t k, const KrylovOptions& options,
                const at::TensorOptions& tensor_options);

 private:
  at::Tensor next_operand() override;
  void use(const at::Tensor& operand, const at::Tensor& product) override;
  std::vector<at::Tensor> make_result() override;  // as in KrylovEigenpairs, without `products`

  bool solves_densely() const { return space_ == nullptr; }
  void solve_densely(const at::Tensor& A);
  void restart_or_finish();
  bool has_converged(const RitzPairs& pairs);
  void finish(const RitzPairs& pairs);
  at::Tensor start() const;
  void check_projection(const at::Tensor& H) const;

  bool symmetric_;
  int64_t n_, k_;
  KrylovOptions options_;
  at::TensorOptions tensor_options_;
  double tol_, epsilon_;
  double last_residual_ = std::numeric_limits<double>::infinity();
  std::unique_ptr<KrylovSpace> space_;
  int64_t restarts_ = 0;
  double restart_error_ = 0.0;
  std::vector<at::Tensor> result_;
};

}  // namespace torchium::linalg::detail
