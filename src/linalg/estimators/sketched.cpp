#include "linalg/estimators/sketched.h"

#include "linalg/common/operator_checks.h"
#include "linalg/common/precision.h"
#include "linalg/common/random_signs.h"
#include "linalg/estimators/hutchinson.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <tuple>

namespace torchium::linalg::detail {
namespace {

// XDiag's, of a matrix that is large enough.
constexpr int64_t kDefaultProducts = 100;

std::vector<at::Tensor> mean_and_error(const at::Tensor& samples) {
  RunningMean mean;
  mean.add(samples);
  return {mean.mean(), mean.standard_error()};
}

// The columns of R^-T, scaled to norm 1: column i is orthogonal to all columns of R but the i-th.
// Where R is singular, which makes the range exact, its pivots count as rounding errors.
at::Tensor left_out_directions(const at::Tensor& R) {
  const at::Tensor largest = R.diagonal().abs().max().clamp_min(std::numeric_limits<float>::min());
  const at::Tensor scaled = R / largest;
  const at::Tensor pivots = scaled.diagonal();
  const double least = epsilon_of(R.scalar_type());
  const at::Tensor safe = at::where(pivots.abs() < least, least, pivots).to(R.scalar_type());
  const at::Tensor regular = scaled.triu(1) + at::diag(safe);
  const at::Tensor S =
      at::linalg_solve_triangular(regular, at::eye(R.size(0), R.options()), /*upper=*/true);
  return S.mT() / norms(S.mT(), 0, /*keepdim=*/true).to(S.scalar_type());
}

}  // namespace

HutchppProcess::HutchppProcess(int64_t n, int64_t num_products, uint64_t seed,
                               const at::TensorOptions& options)
    : OperatorProcess("torchium::hutchpp"),
      n_(n),
      sketch_(std::min(num_products / 3, n)),
      samples_(num_products - 2 * sketch_),
      seed_(seed),
      options_(options) {
  check_operator("hutchpp", n, options);
  TORCH_CHECK_VALUE(num_products >= 3, "hutchpp: num_products is ", num_products,
                    "; it must be at least 3.");
}

at::Tensor HutchppProcess::next_operand() {
  if (!result_.empty()) return {};
  return range_and_samples_.defined() ? range_and_samples_
                                      : random_signs(n_, sketch_, seed_, 0, options_);
}

void HutchppProcess::use(const at::Tensor& operand, const at::Tensor& product) {
  if (!range_and_samples_.defined()) {
    const at::Tensor Q = std::get<0>(at::linalg_qr(product));
    const at::Tensor G = random_signs(n_, samples_, seed_, sketch_, options_);
    range_and_samples_ = at::cat({Q, G - Q.matmul(Q.mT().matmul(G))}, 1);
    return;
  }
  const at::Tensor terms = (operand * product).sum(0, false, at::kDouble);
  const at::Tensor exact = terms.narrow(0, 0, sketch_).sum();
  result_ = mean_and_error(terms.narrow(0, sketch_, samples_) + exact);
}

XdiagProcess::XdiagProcess(int64_t n, std::optional<int64_t> num_products, uint64_t seed,
                           const at::TensorOptions& options)
    : OperatorProcess("torchium::xdiag") {
  check_operator("xdiag", n, options);
  const int64_t most = 2 * n;
  const int64_t products = num_products.value_or(std::min(kDefaultProducts, most));
  const int64_t least = std::min(int64_t{4}, most);
  TORCH_CHECK_VALUE(products >= least && products % 2 == 0 && products <= most,
                    "xdiag: num_products is ", products, "; it must be even, at least ", least,
                    " and at most 2 n = ", most, ".");
  if (products >= n) {  // enough for the diagonal itself
    identity_ = at::eye(n, options);
  } else {
    signs_ = random_signs(n, products / 2, seed, 0, options);
  }
}

at::Tensor XdiagProcess::next_operand() {
  if (!result_.empty()) return {};
  if (identity_.defined()) return identity_;
  return images_.defined() ? range_ : signs_;
}

void XdiagProcess::use(const at::Tensor& /*operand*/, const at::Tensor& product) {
  if (identity_.defined()) {
    const at::Tensor diagonal = product.diagonal().clone();
    result_ = {diagonal, at::zeros_like(diagonal)};
    return;
  }
  if (!images_.defined()) {
    images_ = product.clone();  // the operator may write its next product into the same memory
    std::tie(range_, R_) = at::linalg_qr(images_);
    return;
  }
  // Sample i: diag(Q P Q^T A) + w o (I - Q P Q^T) A w for P = I - s s^T, with Q^T A = Z^T and A w =
  // y.
  const at::Tensor& Z = product;
  const at::Tensor S = left_out_directions(R_);
  const at::Tensor QS = range_.matmul(S), ZS = Z.matmul(S);
  const at::Tensor T = Z.mT().matmul(signs_);
  const at::Tensor outside = images_ - range_.matmul(T) + QS * (S * T).sum(0);
  const at::Tensor exact = (range_ * Z).sum(1, /*keepdim=*/true);
  result_ = mean_and_error(exact - QS * ZS + signs_ * outside);
}

}  // namespace torchium::linalg::detail

namespace torchium::linalg {
namespace {

StochasticEstimate finished(detail::OperatorProcess&& process, const LinearOperator& A) {
  const auto result = process.run(A);
  return {result[0], result[1], process.products()};
}

}  // namespace

StochasticEstimate hutchpp(const LinearOperator& A, int64_t num_products, uint64_t seed) {
  return finished(detail::HutchppProcess(A.size(), num_products, seed, A.options()), A);
}

StochasticEstimate xdiag(const LinearOperator& A, std::optional<int64_t> num_products,
                         uint64_t seed) {
  return finished(detail::XdiagProcess(A.size(), num_products, seed, A.options()), A);
}

}  // namespace torchium::linalg
