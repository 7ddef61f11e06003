#include "gradients/jacobian/jacobian_pieces.h"

#include "gradients/jacobian/dense_block.h"
#include "gradients/jacobian/dense_rows.h"
#include "gradients/jacobian/embedding_block.h"
#include "gradients/jacobian/pair_block.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <utility>

namespace torchium::gradients::detail {
namespace {

// The first position of each piece, with those of one sample side by side.
struct Placement {
  std::vector<int64_t> first;
  int64_t total = 0;
};

Placement place(const std::vector<Piece>& pieces, const std::vector<int64_t>& positions) {
  Placement result;
  std::map<int64_t, int64_t> used;  // by micro-batch
  for (size_t i = 0; i < pieces.size(); ++i) {
    int64_t& next = used[pieces[i].first_row];
    result.first.push_back(next);
    next += positions[i];
    result.total = std::max(result.total, next);
  }
  return result;
}

// Joins tensors [rows, ..., T, k] of the pieces along samples and positions, padded with zeros.
// `dim`: that of the positions.
at::Tensor join(const std::vector<Piece>& pieces, const std::vector<at::Tensor>& tensors,
                int64_t samples, int64_t dim) {
  if (tensors.size() == 1 && pieces[0].rows == samples) {
    return tensors[0];
  }
  std::vector<int64_t> positions;
  for (const auto& tensor : tensors) {
    positions.push_back(tensor.size(dim));
  }
  const Placement placement = place(pieces, positions);
  auto sizes = tensors[0].sizes().vec();
  sizes[0] = samples;
  sizes[dim] = placement.total;
  const at::Tensor result = at::zeros(sizes, tensors[0].options());
  for (size_t i = 0; i < pieces.size(); ++i) {
    result.narrow(0, pieces[i].first_row, pieces[i].rows)
        .narrow(dim, placement.first[i], positions[i])
        .copy_(tensors[i]);
  }
  return result;
}

struct Lookup {
  at::Tensor indices;  // [rows, T]
  at::Tensor e;        // [rows, T, dim]
};

Lookup lookup(const Piece& piece, at::IntArrayRef shape, at::ScalarType dtype) {
  const auto& call = *piece.call;
  TORCH_CHECK_VALUE(
      shape.size() == 2 && call.output_gradient.size(-1) == shape[1] &&
          call.input.sizes() == call.output_gradient.sizes().slice(0, call.input.dim()),
      "calls[", piece.call_index, "]: an embedding with a weight of shape ", shape,
      " got inputs of shape ", call.input.sizes(), " and output_gradients of shape ",
      call.output_gradient.sizes(), "; they must be [...] and [..., ", shape.back(), "]");
  const at::Tensor indices = call.input.to(at::kLong).reshape({piece.rows, -1});
  at::Tensor e = call.output_gradient.to(dtype).reshape({piece.rows, indices.size(1), shape[1]});
  const int64_t padding = call.settings[kPaddingIndex];
  if (padding >= 0) {
    e = e.masked_fill((indices == padding).unsqueeze(2), 0);
  }
  return {indices, e};
}

std::unique_ptr<JacobianBlock> embedding_block(const std::vector<Piece>& pieces,
                                               at::IntArrayRef shape, at::ScalarType dtype,
                                               int64_t samples) {
  std::vector<at::Tensor> indices;
  std::vector<at::Tensor> e;
  for (const auto& piece : pieces) {
    Lookup one = lookup(piece, shape, dtype);
    indices.push_back(std::move(one.indices));
    e.push_back(std::move(one.e));
  }
  return std::make_unique<EmbeddingBlock>(join(pieces, indices, samples, 1),
                                          join(pieces, e, samples, 1), shape[0]);
}

// The positions of a linear, convolution or embedding weight. An embedding is a linear layer with
// input and output gradient exchanged: row k of the table receives e where the index is k.
PositionSource position_source(const Piece& piece, at::IntArrayRef shape, at::ScalarType dtype) {
  if (!piece.is_embedding()) {
    const LayerCall call = with_plain_weight(*piece.call, shape, piece.call_index);
    return PositionSource(call, weight_geometry(call, shape, piece.call_index), dtype);
  }
  const Lookup one = lookup(piece, shape, dtype);
  const at::Tensor one_hot = at::zeros({piece.rows, one.indices.size(1), shape[0]}, one.e.options())
                                 .scatter_(2, one.indices.unsqueeze(2), 1);
  return PositionSource({one.e.unsqueeze(0), one_hot.unsqueeze(0)});
}

PairBlock pair_block(const std::vector<Piece>& pieces, at::IntArrayRef shape, at::ScalarType dtype,
                     int64_t samples) {
  std::vector<PairBlock::Call> calls;
  for (const auto& piece : pieces) {
    calls.push_back({position_source(piece, shape, dtype), piece.first_row});
  }
  const auto options = pieces[0].call->output_gradient.options().dtype(dtype);
  return PairBlock(std::move(calls), pieces[0].groups(), shape, samples, options);
}

at::Tensor rows_of(const Piece& piece, at::IntArrayRef shape, at::ScalarType dtype) {
  if (piece.is_bias) {
    return bias_rows(*piece.call, shape, dtype, piece.call_index);
  }
  if (!piece.is_pair() && !piece.is_embedding()) {
    return norm_weight_rows(*piece.call, shape, dtype, piece.call_index);
  }
  Piece alone = piece;
  alone.first_row = 0;
  return pair_block({alone}, shape, dtype, piece.rows).weighted_rows({}, kMostOperandBytes);
}

std::unique_ptr<JacobianBlock> dense_block(const std::vector<Piece>& pieces, at::IntArrayRef shape,
                                           at::ScalarType dtype, int64_t samples) {
  if (pieces.size() == 1 && pieces[0].rows == samples) {
    if (!pieces[0].is_bias) {
      return std::make_unique<DenseBlock>(rows_of(pieces[0], shape, dtype));
    }
    // The block of the weight may form them on the way.
    check_bias(*pieces[0].call, shape, pieces[0].call_index);
    return std::make_unique<DenseBlock>([call = *pieces[0].call, index = pieces[0].call_index,
                                         shape = shape.vec(),
                                         dtype] { return bias_rows(call, shape, dtype, index); });
  }
  auto sizes = shape.vec();
  sizes.insert(sizes.begin(), samples);
  const at::Tensor rows = at::zeros(sizes, pieces[0].call->output_gradient.options().dtype(dtype));
  for (const auto& piece : pieces) {
    rows.narrow(0, piece.first_row, piece.rows).add_(rows_of(piece, shape, dtype));
  }
  return std::make_unique<DenseBlock>(rows);
}

}  // namespace

std::unique_ptr<JacobianBlock> make_block(const std::vector<Piece>& pieces, at::IntArrayRef shape,
                                          at::ScalarType dtype, int64_t samples) {
  const auto all = [&](auto&& test) { return std::all_of(pieces.begin(), pieces.end(), test); };
  if (pieces.empty()) {
    return nullptr;
  }
  if (all([](const Piece& piece) { return piece.is_embedding(); })) {
    return embedding_block(pieces, shape, dtype, samples);
  }
  if (all([&](const Piece& piece) {
        return (piece.is_pair() || piece.is_embedding()) && piece.groups() == pieces[0].groups();
      })) {
    return std::make_unique<PairBlock>(pair_block(pieces, shape, dtype, samples));
  }
  return dense_block(pieces, shape, dtype, samples);
}

int64_t shared_bias(const std::vector<std::vector<Piece>>& pieces, size_t p) {
  if (pieces[p].empty() || pieces[p][0].call->bias < 0) {
    return -1;
  }
  const int64_t bias = pieces[p][0].call->bias;
  const bool shared = std::equal(pieces[p].begin(), pieces[p].end(), pieces[bias].begin(),
                                 pieces[bias].end(), [](const Piece& weight, const Piece& other) {
                                   return weight.is_pair() && !weight.is_exchanged() &&
                                          other.is_bias && weight.call_index == other.call_index;
                                 });
  return shared ? bias : -1;
}

}  // namespace torchium::gradients::detail
