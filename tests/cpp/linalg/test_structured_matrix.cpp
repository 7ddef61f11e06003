// Matrices of a structure against dense ones.
#include "linalg/products/structured_matrix.h"
#include "optimizer_testing.h"

namespace torchium::testing {
namespace {

using namespace linalg::detail;

struct Shape {
  int64_t n;
  Structure structure;
  int64_t block = 0;
};

const std::vector<Shape> kShapes{
    {1, Structure::kToeplitz},          {2, Structure::kToeplitz},
    {7, Structure::kToeplitz},          {12, Structure::kDense},
    {12, Structure::kBlockDiagonal, 4}, {7, Structure::kBlockDiagonal, 3},
    {3, Structure::kBlockDiagonal, 8},  {9, Structure::kDiagonal}};

// Of a stored batch, entry by entry.
at::Tensor dense(const at::Tensor& M) {
  const int64_t n = M.size(1);
  at::Tensor result = at::zeros({M.size(0), n, n}, M.options());
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const at::Tensor entry = result.select(1, i).select(1, j);
      if (M.dim() == 2) {
        if (i == j) {
          entry.copy_(M.select(1, i));
        }
      } else if (M.size(2) == n) {
        entry.copy_(M.select(1, i).select(1, j));
      } else if (M.size(2) == 1) {
        if (i >= j) {
          entry.copy_(M.select(1, i - j).select(1, 0));
        }
      } else if (i / M.size(2) == j / M.size(2)) {
        entry.copy_(M.select(1, i).select(1, j % M.size(2)));
      }
    }
  }
  return result;
}

// P(S), dense.
at::Tensor projected(const at::Tensor& S, const Shape& shape) {
  const int64_t n = S.size(1);
  at::Tensor result = at::zeros_like(S);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const at::Tensor entry = result.select(1, i).select(1, j);
      const bool is_kept =
          shape.structure == Structure::kDense ||
          (shape.structure == Structure::kDiagonal && i == j) ||
          (shape.structure == Structure::kBlockDiagonal && i / shape.block == j / shape.block);
      if (is_kept) {
        entry.copy_(S.select(1, i).select(1, j));
      } else if (shape.structure == Structure::kToeplitz && i >= j) {
        entry.copy_(S.diagonal(j - i, 1, 2).mean(1) * (i == j ? 1.0 : 2.0));
      }
    }
  }
  return result;
}

at::Tensor random_of(at::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble); }

// Zero where storage has no entry.
at::Tensor stored(const Shape& shape) {
  at::Tensor M = random_of(stored_sizes(2, shape.n, shape.structure, shape.block));
  const int64_t columns = M.dim() == 3 ? M.size(2) : 0;
  if (structure_of(M) == Structure::kBlockDiagonal && shape.n % columns != 0) {
    const int64_t rest = shape.n % columns;
    M.narrow(1, shape.n - rest, rest).narrow(2, rest, columns - rest).zero_();
  }
  return M;
}

TEST(StructuredMatrix, EqualsDenseMatrices) {
  torch::manual_seed(0);
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(c10::str("n ", shape.n, ", structure ", static_cast<int>(shape.structure)));
    const at::Tensor M = stored(shape), N = stored(shape);
    const at::Tensor m = dense(M), X = random_of({2, shape.n, 5});
    expect_near(structured_multiply(M, X), at::bmm(m, X), 1e-12);
    expect_near(structured_multiply(M, X, true), at::bmm(m.mT(), X), 1e-12);
    expect_near(structured_multiply(M, X.mT().contiguous().mT()), at::bmm(m, X), 1e-12);
    expect_near(dense(structured_product(M, N)), at::bmm(m, dense(N)), 1e-12);
    expect_near(dense(structured_gram(M)), projected(at::bmm(m.mT(), m), shape), 1e-12);
    expect_near(structured_diagonal(M), m.diagonal(0, 1, 2), 0.0);
    expect_near(average_trace(M), m.diagonal(0, 1, 2).mean(1), 1e-12);
    const at::Tensor S = structured_moment(X, M.sizes(), M);
    const at::Tensor XX = at::bmm(X, X.mT());
    expect_near(dense(structured_congruence(M, S)),
                projected(at::bmm(m.mT(), at::bmm(XX, m)), shape), 1e-12);
    at::Tensor shifted = M.clone();
    add_to_diagonal_(shifted, 0.5);
    expect_near(dense(shifted), m + 0.5 * at::eye(shape.n, m.options()), 1e-12);
    const at::Tensor row_sums = m.abs().sum(2).amax(1);
    expect_near(largest_row_sum(M), row_sums, 1e-12);
  }
}

}  // namespace
}  // namespace torchium::testing
