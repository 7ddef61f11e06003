#include "linalg/structured/low_rank.h"

#include "linalg/common/precision.h"
#include "linalg/common/random_signs.h"
#include "linalg/structured/iterative/function_of_values.h"
#include "linalg/structured/operand_checks.h"
#include <torchium/linalg/structured_operators.h>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

namespace torchium::linalg::detail {
namespace {

std::vector<int64_t> joint_batch(const at::Tensor& d, const at::Tensor& U, const at::Tensor& V) {
  return at::infer_size(at::infer_size(batch_of(d, 1), batch_of(U, 2)), batch_of(V, 2));
}

}  // namespace

LowRankNode::LowRankNode(const at::Tensor& d, const at::Tensor& U, const at::Tensor& V,
                         bool symmetric)
    : NodeOf("LowRankPlusDiagonal", joint_batch(d, U, V), d.size(-1), options_of(d)),
      d_(d),
      U_(U),
      V_(V),
      symmetric_(symmetric) {}

at::Tensor LowRankNode::multiply(const at::Tensor& X) const {
  return d_.unsqueeze(-1) * X + U_.matmul(V_.mT().matmul(X));
}

LinearOperator LowRankNode::transpose() const {
  return make_operator<LowRankNode>(d_, V_, U_, symmetric_);
}

at::Tensor LowRankNode::to_dense() const { return at::diag_embed(d_) + U_.matmul(V_.mT()); }

Property LowRankNode::property() const {
  if (!symmetric_) {
    return Property::kNone;
  }
  if (!U_.is_same(V_)) {  // of unknown sign
    return Property::kSymmetric;
  }
  const double smallest = d_.numel() == 0 ? 0.0 : d_.detach().min().item<double>();
  return smallest > 0    ? Property::kPositiveDefinite
         : smallest == 0 ? Property::kPositiveSemidefinite
                         : Property::kSymmetric;
}

std::optional<at::Tensor> LowRankNode::diag(const EstimateOptions&) const {
  return d_ + (U_ * V_).sum(-1);
}

bool LowRankNode::has_zero() const { return d_.detach().eq(0).any().item<bool>(); }

at::Tensor LowRankNode::capacitance() const {
  return at::eye(U_.size(-1), options) + V_.mT().matmul(U_ / d_.unsqueeze(-1));
}

// det(D + U V^T) = det(D) det(I + V^T D^-1 U).
std::optional<Slogdet> LowRankNode::slogdet(const EstimateOptions&) const {
  if (has_zero() || (n <= kLargestDenseOrder && is_inaccurate(woodbury()))) {
    return std::nullopt;
  }
  const auto [sign, logabsdet] = at::linalg_slogdet(capacitance());
  return Slogdet{sign * d_.sign().prod(-1), logabsdet + d_.abs().log().sum(at::IntArrayRef{-1})};
}

// (D + U V^T)^-1 = D^-1 - D^-1 U (I + V^T D^-1 U)^-1 V^T D^-1 (Woodbury). None: it is singular.
std::shared_ptr<LowRankNode> LowRankNode::woodbury() const {
  const at::Tensor left = U_ / d_.unsqueeze(-1), right = V_ / d_.unsqueeze(-1);
  const auto [solution, info] =
      at::linalg_solve_ex(capacitance(), left, /*left=*/false, /*check_errors=*/false);
  return info.gt(0).any().item<bool>()
             ? nullptr
             : std::make_shared<LowRankNode>(d_.reciprocal(), -solution, right, symmetric_);
}

// Entries of D that are small next to U V^T may leave nothing of I but rounding errors. By a vector
// of random signs: |A x - z| > sqrt(epsilon) (|A| |x| + |z|) for x = A^-1 z.
bool LowRankNode::is_inaccurate(const std::shared_ptr<LowRankNode>& inverse) const {
  if (!inverse) {
    return false;
  }
  const c10::NoGradGuard no_grad;
  const at::Tensor z = random_signs(n, 1, /*seed=*/0, 0, options);
  const at::Tensor x = inverse->multiply(z);
  const auto length = [](const at::Tensor& y) {
    return at::linalg_vector_norm(y, 2, at::IntArrayRef{-2, -1}, false, at::kDouble);
  };
  const at::Tensor norm = d_.abs().amax(-1).to(at::kDouble) + length(U_) * length(V_);  // at most
  const at::Tensor limit = std::sqrt(epsilon_of(d_.scalar_type())) * (norm * length(x) + length(z));
  return length(multiply(x) - z).gt(limit).any().item<bool>();
}

std::optional<LinearOperator> LowRankNode::apply(const MatrixFunction& f) const {
  if (!f.is_inverse() || has_zero()) {
    return std::nullopt;
  }
  auto inverse = woodbury();
  if (!inverse) {
    throw_singular(kind, f, "I + V^T D^-1 U is singular");
  }
  if (is_inaccurate(inverse)) {
    return std::nullopt;
  }
  return with_property(LinearOperator(std::move(inverse)), std::max(assumed, property()));
}

LinearOperator LowRankNode::plus_diagonal(const at::Tensor& e) const {
  return make_operator<LowRankNode>(d_ + e, U_, V_, symmetric_);
}

}  // namespace torchium::linalg::detail

namespace torchium::linalg {
namespace {

LinearOperator make_low_rank(const at::Tensor& d, const at::Tensor& U,
                             const std::optional<at::Tensor>& V) {
  constexpr auto kKind = "LowRankPlusDiagonal";
  detail::checked_operand(kKind, "d", d, 1);
  detail::checked_operand(kKind, "U", U, 2);
  const at::Tensor other = V && V->defined() ? detail::checked_operand(kKind, "V", *V, 2) : U;
  TORCH_CHECK_VALUE(U.size(-2) == d.size(-1), kKind, ": U is ", U.sizes(), "; it must have ",
                    d.size(-1), " rows, as d has entries.");
  TORCH_CHECK_VALUE(other.size(-2) == U.size(-2) && other.size(-1) == U.size(-1), kKind, ": V is ",
                    other.sizes(), "; its last two dimensions must be those of U, ", U.sizes(),
                    ".");
  for (const at::Tensor& operand : {U, other}) {
    TORCH_CHECK_VALUE(operand.scalar_type() == d.scalar_type() && operand.device() == d.device(),
                      kKind, ": d is ", d.scalar_type(), " on ", d.device(), ", U or V is ",
                      operand.scalar_type(), " on ", operand.device(),
                      "; they must be of one dtype and on one device.");
  }
  return detail::make_operator<detail::LowRankNode>(d, U, other, other.is_same(U));
}

}  // namespace

LowRankPlusDiagonal::LowRankPlusDiagonal(const at::Tensor& d, const at::Tensor& U,
                                         const std::optional<at::Tensor>& V)
    : LinearOperator(make_low_rank(d, U, V)) {}

}  // namespace torchium::linalg
