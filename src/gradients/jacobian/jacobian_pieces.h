// Builds one parameter's Jacobian block from its calls.
#pragma once

#include "gradients/capture/layer_call.h"
#include "gradients/jacobian/jacobian_block.h"

#include <memory>
#include <vector>

namespace torchium::gradients::detail {

// One call of one parameter, and the Jacobian rows that it adds to.
struct Piece {
  const LayerCall* call;
  size_t call_index;
  bool is_bias;
  int64_t first_row;
  int64_t rows;

  bool is_embedding() const { return !is_bias && call->kind == LayerKind::kEmbedding; }
  bool is_pair() const { return !is_bias && is_product(*call); }
  // Whether input and output gradient are exchanged (with_plain_weight()).
  bool is_exchanged() const {
    return !is_bias && (has_transposed_weight(*call) || is_transposed_convolution(*call));
  }
  int64_t groups() const { return groups_of(*call); }
};

// The block of a parameter of this shape, in the state dtype; null without pieces. ValueError if a
// call does not fit a parameter of this shape.
std::unique_ptr<JacobianBlock> make_block(const std::vector<Piece>& pieces, at::IntArrayRef shape,
                                          at::ScalarType dtype, int64_t samples);

// The parameter that is the bias in all calls of parameter p, a linear or convolution weight, and
// in no others; -1 if there is none. `pieces` are those of all parameters, ordered by call.
int64_t shared_bias(const std::vector<std::vector<Piece>>& pieces, size_t p);

}  // namespace torchium::gradients::detail
