// An algorithm that asks for products with an operator, one after the other (reverse
// communication), so that both languages run it with operators of their own.
#pragma once

#include <torchium/linalg/linear_operator.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::linalg::detail {

class OperatorProcess {
 public:
  virtual ~OperatorProcess() = default;

  // The columns [n, columns] to be multiplied next; undefined once the result is there.
  at::Tensor operand();

  // A times operand(). c10::ValueError: another shape, dtype or device, or a changed operand().
  void accept(const at::Tensor& product);

  // c10::Error: products are missing.
  std::vector<at::Tensor> result();

  int64_t products() const { return products_; }

  // A, or the same matrix in a form in which the products that are to come are faster.
  virtual LinearOperator prepared(const LinearOperator& A) const { return A; }

  // Runs to the end with A.
  std::vector<at::Tensor> run(const LinearOperator& A);

 protected:
  virtual at::Tensor next_operand() = 0;  // undefined: finished
  virtual void use(const at::Tensor& operand, const at::Tensor& product) = 0;
  virtual std::vector<at::Tensor> make_result() = 0;

  int64_t products_ = 0;  // columns, with those that use() is given

 private:
  at::Tensor operand_;
  int64_t version_ = 0;  // of operand_, which the operator must not change
};

}  // namespace torchium::linalg::detail
