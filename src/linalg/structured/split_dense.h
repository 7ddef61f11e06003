// A dense float32 matrix that is multiplied again and again.
#pragma once

#include <torchium/linalg/linear_operator.h>

#include <cstdint>

namespace torchium::linalg::detail {

// The columns of the products with an operator.
struct ExpectedProducts {
  int64_t columns;  // of each
  int64_t total;    // of all together, at least
};

// A itself, or the same matrix as two fp16 parts for Hopper's tensor cores (split_product.h), if it
// is a dense float32 one there, the products are so many and so wide that splitting it once pays,
// and the parts, as large as the matrix, fit into the workspace.
LinearOperator prepared_for(const LinearOperator& A, const ExpectedProducts& expected);

}  // namespace torchium::linalg::detail
