#include "gradients/jacobian.h"

#include "gradients/dense_block.h"
#include "gradients/dense_rows.h"
#include "gradients/embedding_block.h"
#include "gradients/pair_block.h"
#include "linalg/operand_checks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <utility>

namespace torchium::gradients::detail {
namespace {

struct MicroBatch {
  size_t first_use;
  c10::SymInt samples;
};

std::map<int64_t, MicroBatch> micro_batches(const std::vector<LayerUse>& uses) {
  std::map<int64_t, MicroBatch> result;
  for (size_t i = 0; i < uses.size(); ++i) {
    const auto samples = samples_of(uses[i]);
    const auto [found, is_new] = result.try_emplace(uses[i].micro_batch, MicroBatch{i, samples});
    TORCH_CHECK_VALUE(is_new || found->second.samples == samples, "uses[", i, "] (",
                      name_of(uses[i].kind), ") has seen ", samples, " samples but uses[",
                      found->second.first_use, "] (", name_of(uses[found->second.first_use].kind),
                      ") of the same backward pass ", found->second.samples,
                      "; dimension 0 of the input of every layer must be the batch");
  }
  return result;
}

// One use of one parameter, and the rows of the Jacobian that it adds to.
struct Piece {
  const LayerUse* use;
  size_t use_index;
  bool is_bias;
  int64_t first_row;
  int64_t rows;

  bool is_embedding() const { return !is_bias && use->kind == LayerKind::kEmbedding; }
  bool is_pair() const {
    return !is_bias && (use->kind == LayerKind::kLinear || use->kind == LayerKind::kConv2d);
  }
  int64_t groups() const { return use->kind == LayerKind::kConv2d ? use->settings[kGroups] : 1; }
};

// Where the positions of each piece begin, when those of one sample stand side by side.
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

// Joins tensors [rows, ..., T, k] of the pieces along samples and positions, with zeros between.
// `dim`: of the positions.
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
  const auto& use = *piece.use;
  TORCH_CHECK_VALUE(shape.size() == 2 && use.output_gradient.size(-1) == shape[1] &&
                        use.input.sizes() == use.output_gradient.sizes().slice(0, use.input.dim()),
                    "uses[", piece.use_index, "]: an embedding with a weight of shape ", shape,
                    " got inputs of shape ", use.input.sizes(), " and output_gradients of shape ",
                    use.output_gradient.sizes(), "; they must be [...] and [..., ", shape.back(),
                    "]");
  const at::Tensor indices = use.input.to(at::kLong).reshape({piece.rows, -1});
  at::Tensor e = use.output_gradient.to(dtype).reshape({piece.rows, indices.size(1), shape[1]});
  const int64_t padding = use.settings[kPaddingIndex];
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

// The positions of a linear, convolution or embedding weight. An embedding is a linear layer whose
// input and output gradient have changed places: row k of the table receives e where the index is
// k.
PositionSource position_source(const Piece& piece, at::IntArrayRef shape, at::ScalarType dtype) {
  if (!piece.is_embedding()) {
    return PositionSource(*piece.use, weight_geometry(*piece.use, shape, piece.use_index), dtype);
  }
  const Lookup one = lookup(piece, shape, dtype);
  const at::Tensor one_hot = at::zeros({piece.rows, one.indices.size(1), shape[0]}, one.e.options())
                                 .scatter_(2, one.indices.unsqueeze(2), 1);
  return PositionSource({one.e.unsqueeze(0), one_hot.unsqueeze(0)});
}

PairBlock pair_block(const std::vector<Piece>& pieces, at::IntArrayRef shape, at::ScalarType dtype,
                     int64_t samples) {
  std::vector<PairBlock::Use> uses;
  for (const auto& piece : pieces) {
    uses.push_back({position_source(piece, shape, dtype), piece.first_row});
  }
  return PairBlock(std::move(uses), pieces[0].groups(), shape, samples);
}

at::Tensor rows_of(const Piece& piece, at::IntArrayRef shape, at::ScalarType dtype) {
  if (piece.is_bias) {
    return bias_rows(*piece.use, shape, dtype, piece.use_index);
  }
  if (!piece.is_pair() && !piece.is_embedding()) {
    return norm_weight_rows(*piece.use, shape, dtype, piece.use_index);
  }
  Piece alone = piece;
  alone.first_row = 0;
  const at::Tensor ones = at::ones({piece.rows}, piece.use->output_gradient.options().dtype(dtype));
  return pair_block({alone}, shape, dtype, piece.rows).weighted_rows(ones);
}

std::unique_ptr<JacobianBlock> dense_block(const std::vector<Piece>& pieces, at::IntArrayRef shape,
                                           at::ScalarType dtype, int64_t samples) {
  if (pieces.size() == 1 && pieces[0].rows == samples) {
    return std::make_unique<DenseBlock>(rows_of(pieces[0], shape, dtype));
  }
  auto sizes = shape.vec();
  sizes.insert(sizes.begin(), samples);
  const at::Tensor rows = at::zeros(sizes, pieces[0].use->output_gradient.options().dtype(dtype));
  for (const auto& piece : pieces) {
    rows.narrow(0, piece.first_row, piece.rows).add_(rows_of(piece, shape, dtype));
  }
  return std::make_unique<DenseBlock>(rows);
}

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

}  // namespace

c10::SymInt count_samples(const std::vector<LayerUse>& uses) {
  c10::SymInt samples = 0;
  for (const auto& [key, micro_batch] : micro_batches(uses)) {
    samples += micro_batch.samples;
  }
  TORCH_CHECK_VALUE(!uses.empty() && samples != 0, "no samples: there are ", uses.size(),
                    " captured uses of layers; run a forward and backward pass of a non-empty "
                    "batch first");
  return samples;
}

Jacobian::Jacobian(at::TensorList params, const std::vector<LayerUse>& uses, double scale,
                   const at::Tensor& loss_scale) {
  check_uses(uses, static_cast<int64_t>(params.size()));
  samples_ = count_samples(uses).guard_int(__FILE__, __LINE__);
  std::map<int64_t, int64_t> first_rows;
  int64_t next = 0;
  for (const auto& [key, micro_batch] : micro_batches(uses)) {
    first_rows[key] = next;
    next += micro_batch.samples.guard_int(__FILE__, __LINE__);
  }
  std::vector<std::vector<Piece>> pieces(params.size());
  for (size_t i = 0; i < uses.size(); ++i) {
    const auto& use = uses[i];
    const Piece piece{&use, i, false, first_rows[use.micro_batch],
                      samples_of(use).guard_int(__FILE__, __LINE__)};
    if (use.weight >= 0) {
      pieces[use.weight].push_back(piece);
    }
    if (use.bias >= 0) {
      pieces[use.bias].push_back(piece);
      pieces[use.bias].back().is_bias = true;
    }
  }
  for (size_t p = 0; p < params.size(); ++p) {
    const auto dtype = linalg::detail::compute_dtype(params[p]);
    columns_.push_back({dtype, params[p].sizes().vec(),
                        make_block(pieces[p], params[p].sizes(), dtype, samples_)});
  }
  scale_ = at::scalar_tensor(scale, uses[0].output_gradient.options().dtype(at::kDouble));
  if (loss_scale.defined()) {
    scale_.div_(loss_scale);
  }
}

at::Tensor Jacobian::gram(at::ArrayRef<double> weights) const {
  at::Tensor K = at::zeros({samples_, samples_}, scale_.options());
  for (size_t p = 0; p < columns_.size(); ++p) {
    if (columns_[p].block) {
      columns_[p].block->add_gram_(K, weights[p]);
    }
  }
  return K.mul_(scale_.square());
}

std::vector<at::Tensor> Jacobian::transpose_product(const at::Tensor& w,
                                                    at::ArrayRef<double> scales) const {
  const at::Tensor scaled = w * scale_;
  std::vector<at::Tensor> result;
  for (size_t p = 0; p < columns_.size(); ++p) {
    const auto& [dtype, shape, block] = columns_[p];
    if (!block) {
      result.push_back(at::zeros(shape, scale_.options().dtype(dtype)));
      continue;
    }
    const at::Tensor of_column = scales.empty() ? scaled : scaled * scales[p];
    result.push_back(block->transpose_product(of_column.to(dtype)));
  }
  return result;
}

Jacobian::Sketch Jacobian::sketch(at::TensorList x, const at::Tensor& w) const {
  const at::Tensor scaled = w * scale_;
  Sketch result;
  for (size_t p = 0; p < columns_.size(); ++p) {
    const auto& [dtype, shape, block] = columns_[p];
    auto [of_x, of_product] =
        block ? block->sketch(x[p], scaled.to(dtype)) : std::pair{x[p], at::zeros_like(x[p])};
    result.of_x.push_back(std::move(of_x));
    result.of_transpose_product.push_back(std::move(of_product));
  }
  return result;
}

at::Tensor Jacobian::product(at::TensorList x, at::ArrayRef<double> scales) const {
  at::Tensor result = at::zeros({samples_}, scale_.options());
  for (size_t p = 0; p < columns_.size(); ++p) {
    if (columns_[p].block) {
      result.add_(columns_[p].block->product(x[p]), scales.empty() ? 1.0 : scales[p]);
    }
  }
  return result.mul_(scale_);
}

std::vector<at::Tensor> Jacobian::rows() const {
  const at::Tensor weights = scale_.expand({samples_});
  std::vector<at::Tensor> result;
  for (const auto& column : columns_) {
    auto sizes = column.shape;
    sizes.insert(sizes.begin(), samples_);
    result.push_back(column.block ? column.block->weighted_rows(weights.to(column.dtype))
                                  : at::zeros(sizes, scale_.options().dtype(column.dtype)));
  }
  return result;
}

}  // namespace torchium::gradients::detail
