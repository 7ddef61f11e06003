// The Jacobian J [n, P]: row i is the gradient of sample i's loss with respect to all parameters.
// Never formed as a whole: the blocks of linear, convolution and embedding weights stay in factors.
#pragma once

#include "gradients/capture/layer_call.h"
#include "gradients/jacobian/jacobian_block.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace torchium::gradients::detail {

// The number of samples in the calls: the sum over micro-batches. ValueError if calls of one
// micro-batch disagree, or there are none. Works on tensors with symbolic sizes.
c10::SymInt count_samples(const std::vector<LayerCall>& calls);

// Raises ValueError unless `rows` are [n, *shape] with n >= 1, one tensor per parameter, of its
// dtype and on its device.
void check_rows(at::TensorList params, at::TensorList rows);

// How the products of two rows are added up.
enum class GramSum : uint8_t {
  kFloat64,
  kFloat32,  // on a GPU, where it is faster, with the precision of a float32 product
};

class Jacobian {
 public:
  // Rows are ordered by micro-batch. Every output gradient is multiplied by `scale / loss_scale`
  // (loss_scale: a number on the device, or undefined for 1). A parameter without calls in a
  // micro-batch has zero rows there. samples: of each micro-batch, by its number; empty: those of
  // the calls. Raises ValueError if calls and parameters do not fit.
  Jacobian(at::TensorList params, const std::vector<LayerCall>& calls, double scale = 1.0,
           const at::Tensor& loss_scale = {}, at::IntArrayRef samples = {});

  // From rows [n, *shape], one tensor per parameter. ValueError if these do not fit.
  Jacobian(at::TensorList params, at::TensorList rows);

  int64_t samples() const { return samples_; }

  // Called before several of the products below: holds the rows of convolutions on a GPU, or
  // patches, of at most this many bytes, that each of them would form.
  void keep_patches(int64_t bytes);

  // sum over the parameters p of weights[p] J_p J_p^T: [n, n] float64; with kFloat32 exactly
  // symmetric.
  at::Tensor gram(at::ArrayRef<double> weights, GramSum sum = GramSum::kFloat64) const;
  // J_p^T w, times scales[p] if given, for w [n]: one tensor per parameter, in its state dtype.
  std::vector<at::Tensor> transpose_product(const at::Tensor& w,
                                            at::ArrayRef<double> scales = {}) const;
  // sum over the parameters p of J_p x_p, times scales[p] if given, for x with one tensor per
  // parameter: [n] float64.
  at::Tensor product(at::TensorList x, at::ArrayRef<double> scales = {}) const;
  // The l2 norm of each row: [n] of `dtype`. See JacobianBlock::add_squared_norms_().
  at::Tensor norms(int64_t max_workspace_bytes, at::ScalarType dtype = at::kDouble) const;
  // J: one tensor [n, *shape] per parameter, in its state dtype. max_workspace_bytes: see
  // JacobianBlock::weighted_rows().
  std::vector<at::Tensor> rows(int64_t max_workspace_bytes = kMostOperandBytes) const;

 private:
  struct Column {
    at::ScalarType dtype;  // of the state
    std::vector<int64_t> shape;
    std::unique_ptr<JacobianBlock> block;  // null: no call, all zero
    int64_t shared_bias;                   // see jacobian_pieces.h
  };

  // Which parameters have no block.
  std::vector<bool> without_block() const;
  // Calls add(block, bias, p) for each block that is not done, with the bias that it shares calls
  // with, or -1 if there is none or it is done. It returns what it has added, which is done then.
  template <typename Add>
  void add_blocks(std::vector<bool>& done, const Add& add) const;
  // Adds what all blocks of vector pairs have in common to compute; sets `done` for those, and for
  // their biases.
  void add_norms_of_pairs_(at::Tensor& squares, int64_t max_workspace_bytes,
                           std::vector<bool>& done) const;

  std::vector<Column> columns_;
  int64_t samples_ = 0;
  at::TensorOptions options_;  // float64
  at::Tensor scale_;           // 0-dim float64; undefined for 1
};

}  // namespace torchium::gradients::detail
