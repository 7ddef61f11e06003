#pragma once

#include "gradients/jacobian/dense_block.h"
#include "gradients/jacobian/device_sums.h"
#include "gradients/jacobian/jacobian_block.h"
#include "gradients/jacobian/narrow_rows.h"
#include "gradients/jacobian/patches.h"

#include <limits>
#include <memory>
#include <optional>
#include <vector>

namespace torchium::gradients::detail {

// A linear or convolution weight: for each group, the row of a sample is the sum over the positions
// t of all its calls of G[group, i, t] A[group, i, t]^T.
class PairBlock : public JacobianBlock {
 public:
  struct Call {
    PositionSource source;
    int64_t first_row;  // of the sample that comes first in `source`
  };

  // `shape` is that of the weight: [groups * fan_out, fan_in...]; `samples` all rows of J, which
  // have these options.
  PairBlock(std::vector<Call> calls, int64_t groups, at::IntArrayRef shape, int64_t samples,
            const at::TensorOptions& options);

  void add_gram_(at::Tensor& K, double weight) const override;
  bool add_gram_with_bias_(at::Tensor& K, double weight, double bias_weight) const override;
  Added add_gram_to(GramSums& sums, double weight, double bias_weight) const override;
  Added add_gram_in_float32_(at::Tensor& K, GramSums& sums, double weight,
                             double bias_weight) const override;
  at::Tensor transpose_product(const at::Tensor& w) const override;
  at::Tensor product(const at::Tensor& x) const override;
  std::optional<VectorPairs> vector_pairs() const override;
  void add_squared_norms_(at::Tensor& squares, int64_t max_workspace_bytes) const override;
  Added add_norms_to(NormSums& sums, bool has_bias, int64_t max_workspace_bytes) const override;
  void keep_patches(int64_t& bytes) override;
  at::Tensor weighted_rows(const at::Tensor& w, int64_t max_workspace_bytes) const override;

 private:
  bool saves_by_pairs() const;
  // The calls as kernels take them; empty: they do not.
  std::vector<DeviceRows::Call> device_calls() const;
  // Of at most `max_bytes`.
  std::optional<NarrowRows> narrow_rows(int64_t max_bytes) const;
  std::vector<int64_t> shape_of_rows() const;
  // What forms the rows on a GPU, if it can.
  std::unique_ptr<DeviceRows> device_rows(int64_t max_bytes, bool with_bias = false) const;
  void add_gram_by_pairs_(at::Tensor& K, double weight, double bias_weight) const;
  void add_gram_by_rows_(at::Tensor& K, double weight) const;
  // Calls visit(positions, first row) for all pieces of all calls, whose patches take at most this
  // many bytes.
  template <typename Visit>
  void for_each_piece(const Visit& visit,
                      int64_t max_bytes = std::numeric_limits<int64_t>::max()) const;

  std::vector<Call> calls_;
  int64_t groups_;
  int64_t fan_in_;
  int64_t fan_out_;
  std::vector<int64_t> shape_;
  int64_t samples_;
  at::TensorOptions options_;
  std::unique_ptr<DenseBlock> rows_;  // kept
};

}  // namespace torchium::gradients::detail
