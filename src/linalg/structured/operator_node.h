// The matrix behind a LinearOperator. A node computes what its structure gives; LinearOperator
// (operators/linear_operator.cpp) does the rest, so that operands of a node can do everything.
#pragma once

#include <torchium/linalg/linear_operator.h>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace torchium::linalg::detail {

// Each contains those above it.
enum class Property { kNone, kSymmetric, kPositiveSemidefinite, kPositiveDefinite };

// exp, or a power.
struct MatrixFunction {
  const char* name;                // for messages
  std::optional<double> exponent;  // none: exp
  IterationOptions iteration;

  bool is_inverse() const { return exponent && *exponent == -1.0; }
  bool is_integer_power() const;
  bool is_positive_integer_power() const { return is_integer_power() && *exponent > 0; }
  // 2 to 16, or -2 to -16.
  bool is_power_of_few_factors() const;
};

struct Slogdet {
  at::Tensor sign, logabsdet;  // [...]
};

// A = V diag(values) V^T with an orthogonal V.
struct Spectrum {
  at::Tensor values;  // [..., n]
  LinearOperator vectors;
};

struct Eigensolution {
  at::Tensor values;  // [n]
  // Indices [k] of values -> eigenvectors [n, k].
  std::function<at::Tensor(const at::Tensor&)> vectors;
};

class OperatorNode {
 public:
  OperatorNode(const char* kind, std::vector<int64_t> batch, int64_t n,
               const at::TensorOptions& options);
  virtual ~OperatorNode() = default;

  virtual at::Tensor multiply(const at::Tensor& X) const = 0;  // [..., n, m]
  // X A for X [..., m, n]; none: by the transposed matrix.
  virtual std::optional<at::Tensor> multiply_left(const at::Tensor&) const { return std::nullopt; }
  virtual LinearOperator transpose() const = 0;
  virtual std::shared_ptr<OperatorNode> clone() const = 0;
  virtual at::Tensor to_dense() const;

  // What the structure shows; property() may read values, is_symmetric() not.
  virtual bool is_symmetric() const { return false; }
  virtual Property property() const;

  virtual std::optional<at::Tensor> diag(const EstimateOptions&) const { return std::nullopt; }
  virtual std::optional<at::Tensor> trace(const EstimateOptions&) const { return std::nullopt; }
  virtual std::optional<Slogdet> slogdet(const EstimateOptions&) const { return std::nullopt; }
  virtual std::optional<LinearOperator> apply(const MatrixFunction&) const { return std::nullopt; }
  virtual std::optional<Spectrum> spectrum() const { return std::nullopt; }  // if symmetric
  virtual std::optional<Eigensolution> eigen() const { return std::nullopt; }

  const char* kind;
  const std::vector<int64_t> batch;
  const int64_t n;
  const at::TensorOptions options;
  Property assumed = Property::kNone;  // LinearOperator::assume
};

// Copies of the derived class.
template <typename Derived>
class NodeOf : public OperatorNode {
 public:
  using OperatorNode::OperatorNode;
  std::shared_ptr<OperatorNode> clone() const override {
    return std::make_shared<Derived>(static_cast<const Derived&>(*this));
  }
};

template <typename Node, typename... Arguments>
LinearOperator make_operator(Arguments&&... arguments) {
  return LinearOperator(std::make_shared<Node>(std::forward<Arguments>(arguments)...));
}

Property property_of(const LinearOperator& A);

// Made of operators, and symmetric or definite if all of them are.
template <typename Derived>
class NodeOfParts : public NodeOf<Derived> {
 public:
  NodeOfParts(const char* kind, int64_t n, const std::vector<LinearOperator>& parts,
              std::vector<int64_t> batch)
      : NodeOf<Derived>(kind, std::move(batch), n, parts[0].options()), parts_(parts) {}

  LinearOperator transpose() const override {
    return mapped([](const LinearOperator& A) { return A.transpose(); });
  }
  bool is_symmetric() const override {
    return std::ranges::all_of(parts_, &LinearOperator::is_symmetric);
  }
  Property property() const override {
    Property lowest = Property::kPositiveDefinite;
    for (const LinearOperator& A : parts_) {
      lowest = std::min(lowest, property_of(A));
    }
    return lowest;
  }

 protected:
  template <typename Function>
  LinearOperator mapped(const Function& f) const {
    std::vector<LinearOperator> images;
    for (const LinearOperator& A : parts_) {
      images.push_back(f(A));
    }
    return make_operator<Derived>(images);
  }

  const std::vector<LinearOperator> parts_;
};

// The node of A if it is of this class.
template <typename Node>
const Node* node_as(const LinearOperator& A) {
  return dynamic_cast<const Node*>(&A.node());
}

// The largest order that is solved densely without structure.
constexpr int64_t kLargestDenseOrder = 1000;

// Total functions of operators, for nodes that consist of others.
LinearOperator apply(const LinearOperator& A, const MatrixFunction& f);
// None: not symmetric, or of an order that is not solved densely.
std::optional<Spectrum> spectrum_of(const LinearOperator& A);
std::optional<Eigensolution> eigen_of(const LinearOperator& A);
Slogdet slogdet_of(const LinearOperator& A, const EstimateOptions& options);
LinearOperator with_property(const LinearOperator& A, Property property);
// Of A^-1.
std::optional<LinearOperator> apply_to_inverse(const LinearOperator& A, const MatrixFunction& f);

}  // namespace torchium::linalg::detail
