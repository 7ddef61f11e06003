// The columns of a Jacobian for one parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace torchium::gradients::detail {

// Row i of J is the outer product of G[i] and A[i].
struct VectorPairs {
  at::Tensor A;  // [n, fan_in]
  at::Tensor G;  // [n, fan_out]
};

class GramSums;
class NormSums;

// What a block has added to a sum.
enum class Added : uint8_t { kNothing, kBlock, kBlockAndBias };

// J: one row per sample, its gradient with respect to one parameter. Kept in factored form in the
// parameter's state dtype (float64 for float64, otherwise float32).
class JacobianBlock {
 public:
  virtual ~JacobianBlock() = default;

  // K += weight * J J^T, with K [n, n] float64, symmetric. Sums are float64, because an error in K
  // is later multiplied by 1 / damping.
  virtual void add_gram_(at::Tensor& K, double weight) const = 0;
  // The same for J and, with `bias_weight`, for the bias with exactly the calls of this weight, by
  // shared products. Returns false and adds nothing if that would save no work.
  virtual bool add_gram_with_bias_(at::Tensor& K, double weight, double bias_weight) const {
    return false;
  }
  // The same as terms of a sum on a GPU that all blocks share; nothing if it does not take them.
  virtual Added add_gram_to(GramSums& sums, double weight, double bias_weight) const {
    return Added::kNothing;
  }
  // The same with sums that are as precise as those of a float32 product; nothing: there are none.
  // The bias has `bias_weight`, unless it is zero, and may be a term of `sums`.
  virtual Added add_gram_in_float32_(at::Tensor& K, GramSums& sums, double weight,
                                     double bias_weight) const {
    return Added::kNothing;
  }
  // J^T w for w [n] of the state dtype: a tensor of the parameter's shape.
  virtual at::Tensor transpose_product(const at::Tensor& w) const = 0;
  // J x for x of the parameter's shape and the state dtype: [n] float64.
  virtual at::Tensor product(const at::Tensor& x) const = 0;
  // Set if every row is an outer product of two vectors.
  virtual std::optional<VectorPairs> vector_pairs() const { return std::nullopt; }
  // Adds the squared l2 norm of each row to squares [n] float64. Rows that must be formed, and
  // copies of their factors, take at most `max_workspace_bytes` at a time, but at least one row is
  // formed.
  virtual void add_squared_norms_(at::Tensor& squares, int64_t max_workspace_bytes) const = 0;
  // The same as terms of a sum on a GPU that all blocks share; nothing if it does not take them.
  virtual Added add_norms_to(NormSums& sums, bool has_bias, int64_t max_workspace_bytes) const {
    return Added::kNothing;
  }
  // For several passes over the rows: holds them, or patches of convolutions, on a GPU, of at most
  // this many bytes, which are subtracted.
  virtual void keep_patches(int64_t& bytes) {}
  // diag(w) J for w [n] of the state dtype, undefined for ones: [n, *shape], in new memory. Copies
  // of factors, as patches of convolutions, take at most `max_workspace_bytes` at a time, but those
  // of at least one sample exist.
  virtual at::Tensor weighted_rows(const at::Tensor& w, int64_t max_workspace_bytes) const = 0;
};

// Bytes of copies of factors that exist at a time, where the caller sets no bound.
constexpr int64_t kMostOperandBytes = int64_t{1} << 29;

// Elements of a float64 workspace: 16 MB.
constexpr int64_t kMaxWorkspaceElements = int64_t{1} << 21;

// The squared l2 norm of each R[i]: [n] float64. Does not overflow in float32.
at::Tensor squared_norms_of(const at::Tensor& R);

// K += weight * R R^T, with R [n, columns].
void add_product_of_rows_(at::Tensor& K, const at::Tensor& R, double weight);

}  // namespace torchium::gradients::detail
