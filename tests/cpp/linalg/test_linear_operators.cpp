// Operators with structure, against dense matrices.
#include <torchium/linalg.h>

#include <torch/torch.h>

#include <functional>
#include <gtest/gtest.h>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace linalg = torchium::linalg;
using linalg::LinearOperator;

at::Tensor regular_matrix(int64_t n, uint64_t seed) {
  torch::manual_seed(seed);
  return 2 * torch::eye(n, torch::kFloat64) + 0.2 * torch::randn({n, n}, torch::kFloat64);
}

struct NamedOperator {
  std::string name;
  LinearOperator A;
  at::Tensor dense;
};

std::vector<NamedOperator> operators_of_every_class() {
  const auto A = regular_matrix(2, 0), B = regular_matrix(3, 1), C = regular_matrix(6, 2);
  const auto d = torch::linspace(0.5, 2, 6, torch::kFloat64);
  const auto U = 0.3 * C.narrow(1, 0, 2), V = 0.3 * C.narrow(1, 2, 2);
  const auto perm = torch::tensor({2, 0, 1, 3, 5, 4}, torch::kLong);
  const auto eye = torch::eye(6, torch::kFloat64);
  const auto kernel = torch::tensor({2.0, 0.3, -0.2}, torch::kFloat64);
  std::vector<at::Tensor> rolled;
  for (int64_t j = 0; j < 6; ++j) {
    rolled.push_back(torch::constant_pad_nd(kernel, {0, 3}).roll(j));
  }
  const auto circulant = torch::stack(rolled, 1);
  const LinearOperator callable(
      6, [C](const at::Tensor& X) { return C.matmul(X); }, torch::kFloat64);
  return {
      {"Dense", linalg::Dense(C), C},
      {"Diagonal", linalg::Diagonal(d), torch::diag(d)},
      {"Identity", linalg::Identity(6, 1.5, torch::kFloat64), 1.5 * eye},
      {"Triangular", linalg::Triangular(C + torch::diag(d)), (C + torch::diag(d)).tril()},
      {"Permutation", linalg::Permutation(perm, torch::kFloat64), eye.index_select(0, perm)},
      {"Convolution", linalg::Convolution(kernel, std::vector<int64_t>{6}), circulant},
      {"Sparse", linalg::Sparse(C.to_sparse()), C},
      {"LinearOperator", callable, C},
      {"Product", linalg::Product({C, callable}), C.matmul(C)},
      {"Sum", linalg::Sum({C, linalg::Diagonal(d)}), C + torch::diag(d)},
      {"Scaled", -1.5 * LinearOperator(C), -1.5 * C},
      {"Kronecker", linalg::Kronecker({A, B}), torch::kron(A, B)},
      {"BlockDiag", linalg::BlockDiag({A, B, linalg::Identity(1, 3.0, torch::kFloat64)}),
       torch::block_diag({A, B, 3 * torch::ones({1, 1}, torch::kFloat64)})},
      {"LowRankPlusDiagonal", linalg::LowRankPlusDiagonal(d, U, V),
       torch::diag(d) + U.matmul(V.mT())},
  };
}

void expect_equal_within_rounding(const at::Tensor& found, const at::Tensor& expected) {
  EXPECT_TRUE(torch::allclose(found, expected, 1e-10, 1e-10, /*equal_nan=*/true))
      << found << "\nexpected\n"
      << expected;
}

TEST(LinearOperators, MultiplySolveAndHaveNumbers) {
  for (const auto& [name, A, dense] : operators_of_every_class()) {
    SCOPED_TRACE(name);
    EXPECT_EQ(A.kind(), name);
    const auto X = torch::randn({6, 2}, torch::kFloat64);
    expect_equal_within_rounding(A.to_dense(), dense);
    expect_equal_within_rounding(A.matmul(X), dense.matmul(X));
    expect_equal_within_rounding(A.matmul(X.select(1, 0)), dense.mv(X.select(1, 0)));
    expect_equal_within_rounding(A.transpose().matmul(X), dense.mT().matmul(X));
    expect_equal_within_rounding(A.rmatmul(X.mT()), X.mT().matmul(dense));
    expect_equal_within_rounding(A.rmatmul(X.select(1, 0)), dense.mT().mv(X.select(1, 0)));
    expect_equal_within_rounding(A.solve(X), torch::linalg_solve(dense, X));
    expect_equal_within_rounding(A.inverse().to_dense(), torch::linalg_inv(dense));
    expect_equal_within_rounding(A.diag(), dense.diagonal());
    expect_equal_within_rounding(A.trace(), dense.trace());
    expect_equal_within_rounding(A.det(), torch::linalg_det(dense));
    expect_equal_within_rounding(A.logdet(), torch::logdet(dense));
    expect_equal_within_rounding(A.exp().to_dense(), torch::linalg_matrix_exp(dense));
    expect_equal_within_rounding(A.pow(3).to_dense(), torch::linalg_matrix_power(dense, 3));
    const auto [values, vectors] = A.eigs(2);
    expect_equal_within_rounding(dense.to(vectors.scalar_type()).matmul(vectors), vectors * values);
    expect_equal_within_rounding((2.0 * A + A - LinearOperator(dense)).to_dense(), 2 * dense);
    expect_equal_within_rounding((-(A * 3.0) / 2.0).to_dense(), -1.5 * dense);
  }
}

TEST(LinearOperators, KeepTheirStructure) {
  const auto A = regular_matrix(3, 0), S = A.matmul(A.mT());
  const auto K = linalg::Kronecker({A, A});
  EXPECT_EQ(K.inverse().kind(), "Kronecker");
  EXPECT_EQ(K.pow(2).kind(), "Kronecker");
  const auto d = torch::ones({3}, torch::kFloat64);
  const auto low_rank = linalg::LowRankPlusDiagonal(d, A.narrow(1, 0, 1));
  EXPECT_EQ(low_rank.inverse().kind(), "LowRankPlusDiagonal");
  EXPECT_EQ((low_rank + linalg::Diagonal(d)).kind(), "LowRankPlusDiagonal");
  const auto definite = LinearOperator(S).assume("positive_definite");
  const auto damped =
      linalg::Kronecker({definite, definite}) + 0.1 * linalg::Identity(9, 1.0, torch::kFloat64);
  EXPECT_TRUE(damped.is_symmetric());
  EXPECT_EQ(damped.inverse().kind(), "Product");  // by the eigenvectors of the factors
  expect_equal_within_rounding(damped.sqrt().matmul(damped.sqrt().to_dense()), damped.to_dense());
}

TEST(LinearOperators, IterateWithoutStructure) {
  const int64_t n = 1500;
  const auto d = torch::linspace(1, 5, n, torch::kFloat64).unsqueeze(1);
  const LinearOperator A(
      n, [d](const at::Tensor& X) { return d * X; }, torch::kFloat64);
  const auto X = torch::randn({n, 2}, torch::kFloat64);
  expect_equal_within_rounding(A.assume("positive_definite").solve(X), X / d);
  linalg::IterationOptions options;
  options.tol = 1e-12;
  expect_equal_within_rounding(A.solve(X, options), X / d);
  expect_equal_within_rounding(A.assume("symmetric").sqrt(options).matmul(X), d.sqrt() * X);
  linalg::EstimateOptions samples;
  samples.num_samples = 3;
  expect_equal_within_rounding(A.diag(samples), d.squeeze(1));  // exact for diagonal matrices
  const auto found = linalg::cg(A, X);
  EXPECT_TRUE(found.converged.all().item<bool>());
  EXPECT_LT(found.iterations, 100);
  linalg::SolverOptions preconditioned;
  preconditioned.preconditioner = linalg::Diagonal(1 / d.squeeze(1));
  EXPECT_LE(linalg::gmres(A, X, preconditioned).iterations, 10);
}

TEST(LinearOperators, SolutionsAreDifferentiable) {
  const auto A = regular_matrix(4, 0).requires_grad_();
  const auto B = torch::ones({4}, torch::kFloat64).requires_grad_();
  linalg::SolverOptions options;
  options.tol = 1e-14;
  const auto found = linalg::gmres(LinearOperator(A), B, options).solution;
  const auto expected = torch::linalg_solve(A, B);
  const auto gradients = torch::autograd::grad({found.square().sum()}, {A, B});
  const auto reference = torch::autograd::grad({expected.square().sum()}, {A, B});
  for (size_t i = 0; i < gradients.size(); ++i) {
    expect_equal_within_rounding(gradients[i], reference[i]);
  }
}

TEST(LinearOperators, RefuseWrongArguments) {
  const auto A = regular_matrix(3, 0);
  EXPECT_THROW(linalg::Dense(torch::ones({2, 3})), c10::ValueError);
  EXPECT_THROW(linalg::Diagonal(torch::zeros({3})).inverse(), c10::ValueError);
  EXPECT_THROW(linalg::Dense(torch::ones({3, 3})).inverse(), c10::ValueError);
  EXPECT_THROW(linalg::Product({A, regular_matrix(2, 0)}), c10::ValueError);
  EXPECT_THROW(linalg::Kronecker({}), c10::ValueError);
  EXPECT_THROW(linalg::Sparse{A}, c10::ValueError);
  EXPECT_THROW(LinearOperator(A).assume("definite"), c10::ValueError);
  EXPECT_THROW(LinearOperator(A).matmul(torch::ones({3})), c10::ValueError);
  EXPECT_THROW(LinearOperator(A).eigs(4), c10::ValueError);
  EXPECT_THROW(linalg::cg(-1.0 * LinearOperator(A), torch::ones({3}, torch::kFloat64)),
               c10::ValueError);
}

TEST(LinearOperators, NameWhatIsUndefinedOrEmpty) {
  const auto message = [](const auto& call) {
    try {
      call();
    } catch (const c10::ValueError& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string();
  };
  const auto w = torch::ones({3}).requires_grad_();
  const auto loss = [&] { return w.square().sum(); };
  EXPECT_EQ(message([] { linalg::Permutation(torch::Tensor()); }),
            "Permutation: perm is undefined; it must be a vector of int64, not empty.");
  EXPECT_EQ(message([&] {
              linalg::hvp_operator(loss, {w, torch::Tensor()});
            }),
            "hvp_operator: params[1] is an undefined tensor.");
  EXPECT_EQ(message([&] { linalg::hvp_operator(nullptr, {w}); }),
            "hvp_operator: loss_fn is empty.");
  EXPECT_EQ(message([&] { linalg::fisher_operator(nullptr, {w}); }),
            "fisher_operator: loss_fn is empty.");
}

TEST(LinearOperators, HaveGradients) {
  const auto A = regular_matrix(2, 0).requires_grad_(), B = regular_matrix(3, 1);
  (linalg::Kronecker({A, B}).logdet()).backward();
  expect_equal_within_rounding(A.grad(), 3 * torch::linalg_inv(A.detach()).mT());
}

}  // namespace
