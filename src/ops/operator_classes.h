// The torch classes of operators, and of the algorithms that multiply by them.
#pragma once

#include "linalg/operators/operator_process.h"
#include <torchium/linalg/linear_operator.h>

#include <torch/custom_class.h>
#include <torch/library.h>

#include <memory>
#include <utility>

namespace torchium::ops {

struct OperatorHandle : torch::CustomClassHolder {
  explicit OperatorHandle(linalg::LinearOperator A) : A(std::move(A)) {}
  linalg::LinearOperator A;
};
using Handle = c10::intrusive_ptr<OperatorHandle>;

struct OperatorProcess : torch::CustomClassHolder {
  explicit OperatorProcess(std::unique_ptr<linalg::detail::OperatorProcess> algorithm)
      : algorithm(std::move(algorithm)) {}

  std::unique_ptr<linalg::detail::OperatorProcess> algorithm;
};
using Process = c10::intrusive_ptr<OperatorProcess>;

// After the class of OperatorHandle, which its schemas name.
void define_process_ops(torch::Library& m);

}  // namespace torchium::ops
