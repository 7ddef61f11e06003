#include "gradients/jacobian/jacobian.h"

#include "gradients/jacobian/dense_block.h"
#include "gradients/jacobian/device_sums.h"
#include "gradients/jacobian/jacobian_pieces.h"
#include "linalg/common/operand_checks.h"
#include "support/phase.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>

namespace torchium::gradients::detail {
namespace {

struct MicroBatch {
  size_t first_call;
  c10::SymInt samples;
};

std::map<int64_t, MicroBatch> micro_batches(const std::vector<LayerCall>& calls) {
  std::map<int64_t, MicroBatch> result;
  for (size_t i = 0; i < calls.size(); ++i) {
    const auto samples = samples_of(calls[i]);
    const auto [found, is_new] = result.try_emplace(calls[i].micro_batch, MicroBatch{i, samples});
    TORCH_CHECK_VALUE(
        is_new || found->second.samples == samples, "calls[", i, "] (", name_of(calls[i].kind),
        ") has seen ", samples, " samples but calls[", found->second.first_call, "] (",
        name_of(calls[found->second.first_call].kind), ") of the same backward pass ",
        found->second.samples, "; dimension 0 of the input of every layer must be the batch");
  }
  return result;
}

bool all_of(const std::vector<bool>& flags) {
  return std::find(flags.begin(), flags.end(), false) == flags.end();
}

}  // namespace

void check_rows(at::TensorList params, at::TensorList rows) {
  TORCH_CHECK_VALUE(!params.empty() && rows.size() == params.size(),
                    "rows must be one tensor per parameter, got ", rows.size(), " for ",
                    params.size(), " parameters");
  const int64_t n = rows[0].dim() == 0 ? 0 : rows[0].size(0);
  for (size_t p = 0; p < rows.size(); ++p) {
    auto expected = params[p].sizes().vec();
    expected.insert(expected.begin(), std::max<int64_t>(n, 1));
    TORCH_CHECK_VALUE(rows[p].sizes() == expected && rows[p].device() == params[p].device() &&
                          rows[p].scalar_type() == params[p].scalar_type(),
                      "rows[", p, "] must be ", params[p].scalar_type(), at::IntArrayRef(expected),
                      " on ", params[p].device(), ", got ", rows[p].scalar_type(), rows[p].sizes(),
                      " on ", rows[p].device());
  }
}

c10::SymInt count_samples(const std::vector<LayerCall>& calls) {
  c10::SymInt samples = 0;
  for (const auto& [key, micro_batch] : micro_batches(calls)) {
    samples += micro_batch.samples;
  }
  TORCH_CHECK_VALUE(!calls.empty() && samples != 0, "no samples: there are ", calls.size(),
                    " captured calls of layers; run a forward and backward pass of a non-empty "
                    "batch first");
  return samples;
}

Jacobian::Jacobian(at::TensorList params, const std::vector<LayerCall>& calls, double scale,
                   const at::Tensor& loss_scale, at::IntArrayRef samples) {
  check_calls(calls, static_cast<int64_t>(params.size()));
  count_samples(calls);
  std::map<int64_t, int64_t> first_rows;
  for (const auto& [key, micro_batch] : micro_batches(calls)) {
    first_rows[key] = samples_;
    samples_ += micro_batch.samples.guard_int(__FILE__, __LINE__);
  }
  if (!samples.empty()) {
    samples_ = 0;
    for (size_t k = 0; k < samples.size(); ++k) {
      first_rows[static_cast<int64_t>(k)] = samples_;
      samples_ += samples[k];
    }
  }
  std::vector<std::vector<Piece>> pieces(params.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    const auto& call = calls[i];
    const Piece piece{&call, i, false, first_rows[call.micro_batch],
                      samples_of(call).guard_int(__FILE__, __LINE__)};
    if (call.weight >= 0) {
      pieces[call.weight].push_back(piece);
    }
    if (call.bias >= 0) {
      pieces[call.bias].push_back(piece);
      pieces[call.bias].back().is_bias = true;
    }
  }
  for (size_t p = 0; p < params.size(); ++p) {
    const auto dtype = linalg::detail::compute_dtype(params[p]);
    columns_.push_back({dtype, params[p].sizes().vec(),
                        make_block(pieces[p], params[p].sizes(), dtype, samples_),
                        shared_bias(pieces, p)});
  }
  options_ = calls[0].output_gradient.options().dtype(at::kDouble);
  if (scale != 1.0 || loss_scale.defined()) {
    scale_ = at::scalar_tensor(scale, options_);
  }
  if (loss_scale.defined()) {
    scale_.div_(loss_scale);
  }
}

Jacobian::Jacobian(at::TensorList params, at::TensorList rows) {
  check_rows(params, rows);
  samples_ = rows[0].size(0);
  options_ = rows[0].options().dtype(at::kDouble);
  for (size_t p = 0; p < params.size(); ++p) {
    const auto dtype = linalg::detail::compute_dtype(params[p]);
    columns_.push_back({dtype, params[p].sizes().vec(),
                        std::make_unique<DenseBlock>(rows[p].to(dtype)), /*shared_bias=*/-1});
  }
}

void Jacobian::keep_patches(int64_t bytes) {
  for (const auto& column : columns_) {
    if (column.block) {
      column.block->keep_patches(bytes);
    }
  }
}

std::vector<bool> Jacobian::without_block() const {
  std::vector<bool> result;
  for (const auto& column : columns_) {
    result.push_back(!column.block);
  }
  return result;
}

template <typename Add>
void Jacobian::add_blocks(std::vector<bool>& done, const Add& add) const {
  for (size_t p = 0; p < columns_.size(); ++p) {
    const auto& column = columns_[p];
    if (done[p]) {
      continue;
    }
    const int64_t bias =
        column.shared_bias >= 0 && !done[column.shared_bias] ? column.shared_bias : -1;
    const Added added = add(*column.block, bias, p);
    done[p] = added != Added::kNothing;
    if (bias >= 0 && added == Added::kBlockAndBias) {
      done[bias] = true;
    }
  }
}

at::Tensor Jacobian::gram(at::ArrayRef<double> weights, GramSum sum) const {
  const torchium::detail::Phase phase("torchium::sample_gram");
  std::vector<bool> done = without_block();
  at::Tensor K;
  if (GramSums::is_available(options_.device())) {
    GramSums sums;
    const auto bias_weight = [&](int64_t bias) { return bias >= 0 ? weights[bias] : 0.0; };
    if (sum == GramSum::kFloat32) {
      add_blocks(done, [&](const JacobianBlock& block, int64_t bias, size_t p) {
        return block.add_gram_in_float32_(K, sums, weights[p], bias_weight(bias));
      });
    }
    if (samples_ <= GramSums::kMostSamples) {
      add_blocks(done, [&](const JacobianBlock& block, int64_t bias, size_t p) {
        return block.add_gram_to(sums, weights[p], bias_weight(bias));
      });
    }
    K = sums.gram(K, options_, samples_);
  } else {
    K = at::zeros({samples_, samples_}, options_);
  }
  const bool is_symmetric = all_of(done);
  add_blocks(done, [&](const JacobianBlock& block, int64_t bias, size_t p) {
    const bool has_both = bias >= 0 && block.add_gram_with_bias_(K, weights[p], weights[bias]);
    return has_both ? Added::kBlockAndBias : Added::kNothing;
  });
  add_blocks(done, [&](const JacobianBlock& block, int64_t, size_t p) {
    block.add_gram_(K, weights[p]);
    return Added::kBlock;
  });
  if (sum == GramSum::kFloat32 && !is_symmetric) {
    K = K.add(K.t()).div_(2.0);
  }
  return scale_.defined() ? K.mul_(scale_.square()) : K;
}

std::vector<at::Tensor> Jacobian::transpose_product(const at::Tensor& w,
                                                    at::ArrayRef<double> scales) const {
  const torchium::detail::Phase phase("torchium::sample_sums");
  const at::Tensor scaled = scale_.defined() ? w * scale_ : w;
  std::vector<at::Tensor> result;
  for (size_t p = 0; p < columns_.size(); ++p) {
    const auto& [dtype, shape, block, bias] = columns_[p];
    if (!block) {
      result.push_back(at::zeros(shape, options_.dtype(dtype)));
      continue;
    }
    const at::Tensor of_column = scales.empty() ? scaled : scaled * scales[p];
    result.push_back(block->transpose_product(of_column.to(dtype)));
  }
  return result;
}

at::Tensor Jacobian::product(at::TensorList x, at::ArrayRef<double> scales) const {
  const torchium::detail::Phase phase("torchium::sample_dots");
  at::Tensor result = at::zeros({samples_}, options_);
  for (size_t p = 0; p < columns_.size(); ++p) {
    if (columns_[p].block) {
      result.add_(columns_[p].block->product(x[p]), scales.empty() ? 1.0 : scales[p]);
    }
  }
  return scale_.defined() ? result.mul_(scale_) : result;
}

at::Tensor Jacobian::norms(int64_t max_workspace_bytes, at::ScalarType dtype) const {
  const torchium::detail::Phase phase("torchium::sample_norms");
  std::vector<bool> done = without_block();
  const bool on_device = NormSums::is_available(options_.device());
  NormSums sums;
  if (on_device) {
    add_blocks(done, [&](const JacobianBlock& block, int64_t bias, size_t) {
      return block.add_norms_to(sums, bias >= 0, max_workspace_bytes);
    });
  }
  at::Tensor squares;
  if (!on_device || !all_of(done)) {
    squares = at::zeros({samples_}, options_);
    add_norms_of_pairs_(squares, max_workspace_bytes, done);
    add_blocks(done, [&](const JacobianBlock& block, int64_t, size_t) {
      block.add_squared_norms_(squares, max_workspace_bytes);
      return Added::kBlock;
    });
  }
  const at::Tensor norms =
      on_device ? sums.norms(squares, options_, samples_, dtype) : squares.sqrt_().to(dtype);
  return scale_.defined() ? norms * scale_ : norms;
}

// Few operators for all layers: squares += sum over layers of (|a|^2 + 1) |g|^2, without 1 where
// there is no bias.
void Jacobian::add_norms_of_pairs_(at::Tensor& squares, int64_t max_workspace_bytes,
                                   std::vector<bool>& done) const {
  std::vector<at::Tensor> vectors;  // A and G of each layer
  std::vector<bool> has_bias;
  int64_t bytes = 0;
  for (size_t p = 0; p < columns_.size(); ++p) {
    const auto& [dtype, shape, block, bias] = columns_[p];
    const auto pairs = done[p] ? std::nullopt : block->vector_pairs();
    if (!pairs) {
      continue;
    }
    const int64_t more = samples_ * (pairs->A.size(1) + pairs->G.size(1)) * 12;  // with the copy
    if (bytes + more > max_workspace_bytes) {
      continue;
    }
    bytes += more;
    vectors.insert(vectors.end(), {pairs->A, pairs->G});
    has_bias.push_back(bias >= 0 && !done[bias]);
    done[p] = true;
    if (bias >= 0) {
      done[bias] = true;
    }
  }
  if (vectors.empty()) {
    return;
  }
  const at::Tensor all = at::cat(vectors, 1).to(at::kDouble).square_();
  at::Tensor sums = at::empty({static_cast<int64_t>(vectors.size()), samples_}, options_);
  int64_t first = 0;
  for (size_t i = 0; i < vectors.size(); ++i) {
    at::Tensor sum = sums[static_cast<int64_t>(i)];
    at::sum_out(sum, all.narrow(1, first, vectors[i].size(1)), at::IntArrayRef({1}));
    first += vectors[i].size(1);
  }
  sums = sums.view({-1, 2, samples_});
  const at::Tensor inputs = sums.select(1, 0);
  for (size_t layer = 0; layer < has_bias.size(); ++layer) {
    if (has_bias[layer]) {
      inputs[static_cast<int64_t>(layer)].add_(1.0);
    }
  }
  squares.add_((inputs * sums.select(1, 1)).sum(0));
}

std::vector<at::Tensor> Jacobian::rows(int64_t max_workspace_bytes) const {
  const torchium::detail::Phase phase("torchium::sample_rows");
  const at::Tensor weights = scale_.defined() ? scale_.expand({samples_}) : scale_;
  std::vector<at::Tensor> result;
  for (const auto& column : columns_) {
    auto sizes = column.shape;
    sizes.insert(sizes.begin(), samples_);
    result.push_back(column.block ? column.block->weighted_rows(
                                        weights.defined() ? weights.to(column.dtype) : weights,
                                        max_workspace_bytes)
                                  : at::zeros(sizes, options_.dtype(column.dtype)));
  }
  return result;
}

}  // namespace torchium::gradients::detail
