// Permutation matrices.
#include "linalg/common/operator_checks.h"
#include "linalg/structured/iterative/function_of_values.h"
#include "linalg/structured/operator_node.h"
#include <torchium/linalg/structured_operators.h>

#include <ATen/ATen.h>

#include <cmath>
#include <vector>

namespace torchium::linalg::detail {
namespace {

// The cycles of a permutation, one entry per index.
struct Cycles {
  at::Tensor id;        // of the cycle
  at::Tensor position;  // in its cycle
  at::Tensor length;    // of its cycle
};

Cycles cycles_of(const at::Tensor& perm) {
  const at::Tensor on_host = perm.cpu().contiguous();
  const int64_t* next = on_host.const_data_ptr<int64_t>();
  const int64_t n = perm.size(0);
  std::vector<int64_t> id(n, -1), position(n), length(n);
  for (int64_t start = 0; start < n; ++start) {
    if (id[start] >= 0) {
      continue;
    }
    std::vector<int64_t> members;
    for (int64_t i = start; id[i] < 0; i = next[i]) {
      id[i] = start;
      position[i] = static_cast<int64_t>(members.size());
      members.push_back(i);
    }
    for (const int64_t i : members) {
      length[i] = static_cast<int64_t>(members.size());
    }
  }
  const auto on_device = [&](const std::vector<int64_t>& x) {
    return at::tensor(x, at::kLong).to(perm.device());
  };
  return {on_device(id), on_device(position), on_device(length)};
}

class PermutationNode final : public NodeOf<PermutationNode> {
 public:
  PermutationNode(const at::Tensor& perm, const at::TensorOptions& options)
      : NodeOf("Permutation", std::vector<int64_t>{}, perm.size(0), options), perm_(perm) {}

  at::Tensor multiply(const at::Tensor& X) const override { return X.index_select(-2, perm_); }

  LinearOperator transpose() const override {
    return make_operator<PermutationNode>(perm_.argsort(), options);
  }

  at::Tensor to_dense() const override { return at::eye(n, options).index_select(0, perm_); }

  std::optional<at::Tensor> diag(const EstimateOptions&) const override {
    return perm_.eq(at::arange(n, perm_.options())).to(options.dtype());
  }

  // The sign of a cycle of length L is (-1)^(L - 1).
  std::optional<Slogdet> slogdet(const EstimateOptions&) const override {
    const at::Tensor swaps = n - cycles_of(perm_).position.eq(0).sum();
    return Slogdet{(1 - 2 * swaps.remainder(2)).to(options.dtype()), at::zeros({}, options)};
  }

  std::optional<LinearOperator> apply(const MatrixFunction& f) const override {
    if (!f.is_integer_power()) {
      return function_by_cycles(f);
    }
    // Step p places along the cycle: order the indices by cycle and position.
    const Cycles c = cycles_of(perm_);
    const at::Tensor members = (c.id * n + c.position).argsort();
    const at::Tensor place = members.argsort();
    const auto p = static_cast<int64_t>(*f.exponent);
    const at::Tensor moved = place - c.position + (c.position + p).remainder(c.length);
    return make_operator<PermutationNode>(members.index_select(0, moved), options);
  }

  // exp(2 pi i j / L) for j < L; entry i of its vector is exp(2 pi i j position / L) / sqrt(L).
  std::optional<Eigensolution> eigen() const override {
    const Cycles c = cycles_of(perm_);
    const auto wave = [](const at::Tensor& phase, const at::Tensor& length) {
      const at::Tensor angle = phase.remainder(length).to(at::kDouble) * (2 * M_PI) / length;
      return at::polar(at::ones_like(angle), angle);
    };
    const auto dtype = c10::toComplexType(c10::typeMetaToScalarType(options.dtype()));
    const auto vectors = [c, wave, dtype](const at::Tensor& indices) {
      const at::Tensor j = c.position.index_select(0, indices);
      const at::Tensor length = c.length.index_select(0, indices);
      const at::Tensor inside = c.id.unsqueeze(1) == c.id.index_select(0, indices);
      const at::Tensor modes = wave(c.position.unsqueeze(1) * j, length.expand_as(inside));
      return (modes * inside / length.to(at::kDouble).sqrt()).to(dtype);
    };
    return Eigensolution{wave(c.position, c.length).to(dtype), vectors};
  }

 private:
  // A cycle is a periodic shift of its members. Q^T diag(f(shifts), ...) Q, by lengths.
  LinearOperator function_by_cycles(const MatrixFunction& f) const {
    const Cycles c = cycles_of(perm_);
    const at::Tensor is_even = c.length.remainder(2).eq(0);  // with an eigenvalue -1
    function_of_values(kind, f, 1.0 - 2.0 * is_even.to(options.dtype()), /*noise=*/0.0);
    at::Tensor members = (c.id * n + c.position).argsort();
    const at::Tensor order = c.length.index_select(0, members)
                                 .argsort(
                                     /*stable=*/true, /*dim=*/0, /*descending=*/false);
    members = members.index_select(0, order);
    const auto [lengths, inverse, counts] = at::unique_consecutive(
        c.length.index_select(0, members).cpu(), /*return_inverse=*/false, /*return_counts=*/true);
    std::vector<LinearOperator> blocks;
    for (int64_t i = 0; i < lengths.size(0); ++i) {
      const auto length = lengths[i].item<int64_t>();
      const at::Tensor kernel = at::zeros({length}, options);
      kernel[length - 1] = 1.0;
      const int64_t copies = counts[i].item<int64_t>() / length;
      blocks.push_back(
          Kronecker({Identity(copies, 1.0, options), detail::apply(Convolution(kernel), f)}));
    }
    const auto Q = make_operator<PermutationNode>(members, options);
    return Product({Q.transpose(), BlockDiag(blocks), Q});
  }

  at::Tensor perm_;
};

const at::Tensor& checked_permutation(const at::Tensor& perm) {
  TORCH_CHECK_VALUE(
      perm.defined() && perm.dim() == 1 && perm.numel() > 0 && perm.scalar_type() == at::kLong,
      "Permutation: perm is ",
      perm.defined() ? c10::str(perm.sizes(), " of ", perm.scalar_type()) : "undefined",
      "; it must be a vector of int64, not empty.");
  const at::Tensor sorted = std::get<0>(perm.sort());
  TORCH_CHECK_VALUE(sorted.equal(at::arange(perm.numel(), perm.options())),
                    "Permutation: perm does not contain every index from 0 to ", perm.numel() - 1,
                    " once.");
  return perm;
}

}  // namespace
}  // namespace torchium::linalg::detail

namespace torchium::linalg {

Permutation::Permutation(const at::Tensor& perm, const at::TensorOptions& options)
    : LinearOperator(detail::make_operator<detail::PermutationNode>(
          perm, at::TensorOptions(c10::typeMetaToScalarType(options.dtype()))
                    .device(detail::checked_permutation(perm).device()))) {
  detail::check_operator("Permutation", perm.numel(), options);
}

}  // namespace torchium::linalg
