// The methods of Lanczos and Arnoldi with thick restarts: see torchium/linalg/krylov.h.
#pragma once

#include "linalg/krylov/krylov_space.h"
#include "linalg/krylov/small_eigenproblem.h"
#include "linalg/operators/operator_process.h"
#include <torchium/linalg/krylov.h>

#include <c10/core/Event.h>

#include <memory>
#include <optional>

namespace torchium::linalg::detail {

class KrylovProcess final : public OperatorProcess {
 public:
  // is_dense: of the operator.
  KrylovProcess(bool symmetric, int64_t n, std::optional<int64_t> k, const KrylovOptions& options,
                bool is_dense, const at::TensorOptions& tensor_options);

 private:
  at::Tensor product(const LinearOperator& A, const at::Tensor& X) const override;
  at::Tensor next_operand() override;
  void use(const at::Tensor& operand, const at::Tensor& product) override;
  std::vector<at::Tensor> make_result() override;  // as in KrylovEigenpairs, without `products`

  bool solves_densely() const { return space_ == nullptr; }
  void solve_densely(const at::Tensor& A);
  at::Tensor start() const;

  // H above B, on its way to the host.
  struct Snapshot {
    at::Tensor projection;
    c10::Event arrival;
    int64_t step;
  };
  Snapshot snapshot() const;
  bool check(const Snapshot& snapshot);
  bool finish_on_device();
  void restart();
  bool has_converged(const RitzPairs& pairs, int64_t step);
  void finish(const RitzPairs& pairs);
  void check_projection(const at::Tensor& H) const;
  bool is_symmetric(double asymmetry, double norm) const;

  bool symmetric_;
  int64_t n_, k_, block_;
  KrylovOptions options_;
  at::TensorOptions tensor_options_;
  bool checks_late_;  // once the device has its next products
  double tol_, epsilon_;
  std::unique_ptr<KrylovSpace> space_;
  int64_t steps_ = 0;  // products with a block
  int64_t next_check_;
  std::optional<Snapshot> late_;
  int64_t last_step_ = 0;       // of the last check
  double last_residual_ = 1.0;  // there, in units of the largest eigenvalue
  int64_t restarts_ = 0;
  double restart_error_ = 0.0;
  // Of the last check:
  at::Tensor H_, B_;
  RitzPairs pairs_;
  std::vector<at::Tensor> result_;
};

}  // namespace torchium::linalg::detail
