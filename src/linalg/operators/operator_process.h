// An algorithm that asks for products with an operator, one after the other.
#pragma once

#include <torchium/linalg/linear_operator.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace torchium::linalg::detail {

class OperatorProcess {
 public:
  // phase: its name in profiles, a literal.
  explicit OperatorProcess(const char* phase) : phase_(phase) {}
  virtual ~OperatorProcess() = default;

  // Runs to the end with A; all but the products outside of transforms. c10::ValueError: a product
  // of another shape, dtype or device, or one that changes its operand.
  std::vector<at::Tensor> run(const LinearOperator& A);

  int64_t products() const { return products_; }

 protected:
  // A, or the same matrix in a form in which the products that are to come are faster.
  virtual LinearOperator prepared(const LinearOperator& A) const { return A; }
  // A X, for the operand X.
  virtual at::Tensor product(const LinearOperator& A, const at::Tensor& X) const {
    return A.matmul(X);
  }
  // The columns [n, columns] to be multiplied next; undefined once the result is there.
  virtual at::Tensor next_operand() = 0;
  virtual void use(const at::Tensor& operand, const at::Tensor& product) = 0;
  virtual std::vector<at::Tensor> make_result() = 0;

  // The product in units of 2^exponent(), so that its squares stay within the range of float64;
  // those of float32 do anyway. The first product decides: mostly the exponent is 0.
  at::Tensor in_units(const at::Tensor& product);
  int exponent() const { return exponent_.value_or(0); }

  int64_t products_ = 0;  // columns, with those that use() is given

 private:
  void multiply(const LinearOperator& A, const at::Tensor& X);

  const char* phase_;
  std::optional<int> exponent_;
};

}  // namespace torchium::linalg::detail
