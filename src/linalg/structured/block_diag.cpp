// Block-diagonal matrices.
#include "linalg/structured/operand_checks.h"
#include "linalg/structured/operator_node.h"
#include <torchium/linalg/structured_operators.h>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include <vector>

namespace torchium::linalg::detail {
namespace {

int64_t sum_of_orders(const std::vector<LinearOperator>& blocks) {
  int64_t n = 0;
  for (const LinearOperator& A : blocks) {
    n += A.size();
  }
  return n;
}

class BlockDiagNode final : public NodeOfParts<BlockDiagNode> {
 public:
  explicit BlockDiagNode(const std::vector<LinearOperator>& blocks)
      : NodeOfParts("BlockDiag", sum_of_orders(blocks), blocks, common_batch(blocks)) {
    for (const LinearOperator& A : blocks) {
      orders_.push_back(A.size());
    }
  }

  at::Tensor multiply(const at::Tensor& X) const override {
    const std::vector<at::Tensor> parts = X.split_with_sizes(orders_, -2);
    const auto leading = at::infer_size(batch, batch_of(X, 2));
    std::vector<at::Tensor> images;
    for (size_t i = 0; i < parts_.size(); ++i) {
      std::vector<int64_t> sizes = leading;
      sizes.insert(sizes.end(), {orders_[i], X.size(-1)});
      images.push_back(parts_[i].node().multiply(parts[i]).expand(sizes));
    }
    return at::cat(images, -2);
  }

  at::Tensor to_dense() const override {
    if (!batch.empty()) {
      return OperatorNode::to_dense();
    }
    std::vector<at::Tensor> blocks;
    for (const LinearOperator& A : parts_) {
      blocks.push_back(A.to_dense());
    }
    return at::block_diag(blocks);
  }

  std::optional<at::Tensor> diag(const EstimateOptions& estimate) const override {
    return concatenated([&](const LinearOperator& A) { return A.diag(estimate); });
  }

  std::optional<at::Tensor> trace(const EstimateOptions& estimate) const override {
    at::Tensor total = at::zeros({}, options);
    for (const LinearOperator& A : parts_) {
      total = total + A.trace(estimate);
    }
    return total;
  }

  std::optional<Slogdet> slogdet(const EstimateOptions& estimate) const override {
    Slogdet found{at::ones({}, options), at::zeros({}, options)};
    for (const LinearOperator& A : parts_) {
      const Slogdet block = slogdet_of(A, estimate);
      found = {found.sign * block.sign, found.logabsdet + block.logabsdet};
    }
    return found;
  }

  std::optional<LinearOperator> apply(const MatrixFunction& f) const override {
    return mapped([&](const LinearOperator& A) { return detail::apply(A, f); });
  }

  // The blocks of a symmetric matrix are symmetric.
  std::optional<Spectrum> spectrum() const override {
    std::vector<LinearOperator> vectors;
    std::vector<Spectrum> parts;
    for (const LinearOperator& A : parts_) {
      auto found = spectrum_of(with_property(A, Property::kSymmetric));
      if (!found) {
        return std::nullopt;
      }
      parts.push_back(*found);
      vectors.push_back(found->vectors);
    }
    size_t i = 0;
    const at::Tensor values =
        concatenated([&](const LinearOperator&) { return parts[i++].values; });
    return Spectrum{values, make_operator<BlockDiagNode>(vectors)};
  }

  std::optional<Eigensolution> eigen() const override {
    std::vector<Eigensolution> parts;
    std::vector<at::Tensor> values;
    for (const LinearOperator& A : parts_) {
      auto found = eigen_of(A);
      if (!found) {
        return std::nullopt;
      }
      parts.push_back(*found);
      values.push_back(found->values);
    }
    const auto vectors = [parts](const at::Tensor& indices) {
      std::vector<at::Tensor> rows;
      int64_t first = 0;
      for (const Eigensolution& part : parts) {
        const int64_t order = part.values.size(0);
        const at::Tensor mine = (indices >= first).logical_and(indices < first + order);
        rows.push_back(part.vectors((indices - first).clamp(0, order - 1)) * mine);
        first += order;
      }
      return at::cat(rows, 0);
    };
    return Eigensolution{at::cat(values), vectors};
  }

 private:
  template <typename Function>
  at::Tensor concatenated(const Function& f) const {
    std::vector<at::Tensor> parts;
    for (const LinearOperator& A : parts_) {
      std::vector<int64_t> sizes = batch;
      sizes.push_back(A.size());
      parts.push_back(f(A).expand(sizes));
    }
    return at::cat(parts, -1);
  }

  std::vector<int64_t> orders_;
};

}  // namespace
}  // namespace torchium::linalg::detail

namespace torchium::linalg {

BlockDiag::BlockDiag(const std::vector<LinearOperator>& blocks)
    : LinearOperator(detail::make_operator<detail::BlockDiagNode>(
          detail::checked_operators("BlockDiag", "blocks", blocks, /*any_order=*/true))) {}

}  // namespace torchium::linalg
