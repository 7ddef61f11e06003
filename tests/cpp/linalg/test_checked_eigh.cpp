#include "linalg/spectral/checked_eigh.h"
#include <torchium/linalg/matrix_functions.h>
#include <torchium/optim/adagrad.h>
#include <torchium/optim/kfac.h>
#include <torchium/optim/shampoo.h>

#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <gtest/gtest.h>
#include <type_traits>
#include <vector>

namespace {

using torchium::linalg::eigh_retries;
using torchium::linalg::detail::spoil_first_attempts;

// LAPACK gives wrong eigenvalues in the given attempts, as it does for some sparse matrices.
class WrongAttempts {
 public:
  explicit WrongAttempts(int attempts) { spoil_first_attempts(attempts); }
  ~WrongAttempts() { spoil_first_attempts(0); }
};

std::vector<torch::Tensor> matrices(int64_t n) {
  torch::manual_seed(3);
  const auto X = torch::randn({n, 4}, torch::kDouble);
  const auto Q = std::get<0>(torch::linalg_qr(torch::randn({n, n}, torch::kDouble)));
  const auto spectrum = [&](const torch::Tensor& values) { return (Q * values).matmul(Q.mT()); };
  return {X.matmul(X.mT()),
          torch::randn({n, n}, torch::kDouble),
          spectrum(torch::ones(n)),
          spectrum(torch::arange(n).remainder(2)),
          spectrum(torch::logspace(0, -12, n)),
          torch::zeros({n, n}, torch::kDouble),
          1e-20 * X.matmul(X.mT())};
}

double frobenius(const torch::Tensor& x) { return x.norm().item<double>(); }

TEST(CheckedEigh, IsRightHoweverManyAttemptsAreWrong) {
  for (const int attempts : {0, 1, 2}) {
    const WrongAttempts wrong(attempts);
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      const double unit = dtype == torch::kFloat ? 1.2e-7 : 2.2e-16;
      for (const int64_t n : {1, 2, 5, 33, 70}) {
        const auto A = torch::stack(matrices(n)).to(dtype);
        const auto S = ((A + A.mT()) / 2).to(torch::kDouble);
        const auto [values, vectors] = torchium::linalg::eigh(A);
        const auto Q = vectors.to(torch::kDouble), D = values.to(torch::kDouble);
        const auto identity = torch::eye(n, torch::kDouble);
        const double tolerance = 8 * unit * static_cast<double>(n);
        for (int64_t i = 0; i < A.size(0); ++i) {
          EXPECT_LE(frobenius(S[i].matmul(Q[i]) - Q[i] * D[i]), tolerance * frobenius(S[i]))
              << "attempts " << attempts << ", n = " << n << ", matrix " << i;
          EXPECT_LE(frobenius(Q[i].mT().matmul(Q[i]) - identity), tolerance);
          EXPECT_TRUE((D[i].diff() >= 0).all().item<bool>());
        }
      }
    }
  }
}

TEST(CheckedEigh, AcceptsEigensystemsAlone) {
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    for (const int64_t n : {2, 33}) {
      const auto X = torch::randn({n, n / 2}, torch::kDouble);  // half of the eigenvalues are 0
      const auto S = X.matmul(X.mT()).to(dtype);
      const auto [values, vectors] = torch::linalg_eigh(S.to(torch::kDouble));
      const auto accepts = [&](const torch::Tensor& D, const torch::Tensor& Q) {
        return torchium::linalg::detail::is_eigensystem(S, D.to(dtype),
                                                        Q.to(dtype).mT().contiguous().mT());
      };
      EXPECT_TRUE(accepts(values, vectors));
      EXPECT_FALSE(accepts(values.flip(0), vectors));
      EXPECT_FALSE(accepts(1.01 * values, vectors));
      EXPECT_FALSE(accepts(values, vectors.roll(1, 1)));
      EXPECT_FALSE(accepts(values, vectors * (values > 1e-6)));  // not orthogonal
      EXPECT_FALSE(accepts(values * NAN, vectors));
      EXPECT_FALSE(accepts(values, vectors * NAN));
    }
  }
}

TEST(CheckedEigh, CountsWhatItSolvesAgain) {
  const auto A = torch::stack({matrices(20)[0], torch::eye(20, torch::kDouble)});
  const int64_t before = eigh_retries();
  torchium::linalg::eigh(A);
  EXPECT_EQ(eigh_retries(), before);
  const WrongAttempts wrong(2);
  torchium::linalg::eigh(A);  // the identity has no couplings, and needs no solver
  EXPECT_EQ(eigh_retries(), before + 1);
}

template <typename Optimizer, typename Options>
torch::Tensor trained(const Options& options) {
  torch::manual_seed(0);
  torch::nn::Linear model(12, 5);
  auto optimizer = [&] {
    if constexpr (std::is_same_v<Optimizer, torchium::optim::KFAC>) {
      return Optimizer(*model, options);
    } else {
      return Optimizer(model->parameters(), options);
    }
  }();
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(model(torch::randn({16, 12})),
                                         torch::arange(16).remainder(5))
        .backward();
    optimizer.step();
  }
  return model->weight.detach().clone();
}

// No root failure is counted, and the steps are the same up to rounding errors.
template <typename Optimizer, typename Options>
void expect_the_same_steps(const Options& options) {
  const auto expected = trained<Optimizer>(options);
  for (const int attempts : {1, 2}) {
    const WrongAttempts wrong(attempts);
    const int64_t before = eigh_retries();
    EXPECT_TRUE(torch::allclose(trained<Optimizer>(options), expected, 1e-3, 1e-4));
    EXPECT_GT(eigh_retries(), before);
  }
}

TEST(CheckedEigh, OptimizersTrainOn) {
  using namespace torchium::optim;
  expect_the_same_steps<Shampoo>(ShampooOptions(0.01).update_freq(1).root_method("eigh"));
  expect_the_same_steps<Adagrad>(AdagradOptions(0.01).full_matrix(true).root_method("eigh"));
  for (const char* split : {"pi", "plain", "exact"}) {
    expect_the_same_steps<KFAC>(
        KFACOptions(0.01).solver("eigh").TCov(1).TInv(1).damping_split(split));
  }
}

double seconds(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST(Roots, OfAnyOrderTakeNoLongerThanOthers) {
  const auto A = matrices(40)[0].to(torch::kFloat);
  for (const char* method : {"auto", "eigh", "newton"}) {
    for (const int64_t root : {int64_t{256}, int64_t{257}, int64_t{1} << 40}) {
      EXPECT_LT(seconds([&] {
                  const auto info = torchium::linalg::matrix_inverse_root_info(
                      A, root, {.eps = 1e-3, .method = method});
                  EXPECT_TRUE(info.root.isfinite().all().item<bool>());
                }),
                20);
    }
  }
  for (const double exponent : {-1e-6, -1e-12, -1.0 / 256}) {
    torchium::optim::ShampooOptions options(0.01);
    options.exponent(exponent).update_freq(1);
    EXPECT_LT(seconds([&] { trained<torchium::optim::Shampoo>(options); }), 20);
  }
}

}  // namespace
