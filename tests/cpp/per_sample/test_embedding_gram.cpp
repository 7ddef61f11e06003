// Both methods for the inner products of an embedding's samples agree with those of the dense rows.
#include "gradients/jacobian/embedding_gram.h"
#include "optimizer_testing.h"

namespace torchium::testing {
namespace {

using gradients::detail::add_embedding_gram_;
using gradients::detail::add_embedding_gram_on_cpu_;
using gradients::detail::scatter_lookups;

// [n, table_rows, dim] in float64, one position at a time.
torch::Tensor dense_rows(const torch::Tensor& indices, const torch::Tensor& e, int64_t table_rows) {
  const auto rows = torch::zeros({indices.size(0), table_rows, e.size(2)}, torch::kDouble);
  for (int64_t i = 0; i < indices.size(0); ++i) {
    for (int64_t t = 0; t < indices.size(1); ++t) {
      rows[i][indices[i][t].item<int64_t>()] += e[i][t].to(torch::kDouble);
    }
  }
  return rows;
}

struct Table {
  int64_t samples;
  int64_t positions;
  int64_t rows;
  int64_t dim;
};

class EmbeddingGram : public ::testing::TestWithParam<Table> {
 protected:
  void SetUp() override {
    torch::manual_seed(3);
    const auto [n, T, rows, dim] = GetParam();
    indices = torch::randint(rows, {n, T}, torch::kLong);
    e = torch::randn({n, T, dim}, torch::kDouble);
    start = torch::randn({n, n}, torch::kDouble);
    start += start.t().clone();
  }
  torch::Tensor expected(const torch::Tensor& values) const {
    const auto rows = dense_rows(indices, values, GetParam().rows).flatten(1);
    return start + 0.3 * rows.mm(rows.t());
  }

  torch::Tensor indices, e, start;
};

TEST_P(EmbeddingGram, ComesInChunksOfColumns) {
  const auto [n, T, rows, dim] = GetParam();
  const int64_t column = n * std::min(rows, n * T);
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    const auto values = e.to(dtype);
    // One column at a time, two, all but one, and all.
    for (const int64_t workspace :
         {int64_t{1}, 2 * column, std::max<int64_t>(1, dim - 1) * column, dim * column}) {
      SCOPED_TRACE(workspace);
      auto K = start.clone();
      add_embedding_gram_(K, indices, values, rows, 0.3, workspace);
      expect_near(K, expected(values), dtype == torch::kDouble ? 1e-12 : 1e-6);
    }
  }
}

TEST_P(EmbeddingGram, ComesFromSharedRowsOnTheCpu) {
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    const auto values = e.to(dtype);
    auto K = start.clone();
    add_embedding_gram_on_cpu_(K, indices, values, 0.3);
    expect_near(K, expected(values), dtype == torch::kDouble ? 1e-12 : 1e-6);
  }
}

TEST_P(EmbeddingGram, ScattersLookups) {
  expect_near(scatter_lookups(indices, e, GetParam().rows), dense_rows(indices, e, GetParam().rows),
              1e-12);
}

// Fewer lookups than table rows (they are renumbered), more, many samples at one row, and a single
// column.
INSTANTIATE_TEST_SUITE_P(Tables, EmbeddingGram,
                         ::testing::Values(Table{3, 4, 100, 5}, Table{6, 7, 5, 3},
                                           Table{20, 3, 2, 9}, Table{4, 1, 1, 1},
                                           Table{1, 5, 3, 4}));

TEST(EmbeddingGramOfNothing, IsZero) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{3, 0}, {0, 2}}) {
    const auto indices = torch::zeros(shape, torch::kLong);
    const auto start = torch::ones({shape[0], shape[0]}, torch::kDouble);
    auto K = start.clone();
    add_embedding_gram_(K, indices, torch::zeros({shape[0], shape[1], 4}), 5, 1.0);
    expect_equal({K}, {start});
  }
}

}  // namespace
}  // namespace torchium::testing
