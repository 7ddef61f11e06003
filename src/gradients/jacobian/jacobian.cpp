#include "gradients/jacobian/jacobian.h"

#include "gradients/jacobian/jacobian_pieces.h"
#include "linalg/operand_checks.h"

#include <ATen/ATen.h>

#include <map>
#include <utility>

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

}  // namespace

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
                   const at::Tensor& loss_scale) {
  check_calls(calls, static_cast<int64_t>(params.size()));
  samples_ = count_samples(calls).guard_int(__FILE__, __LINE__);
  std::map<int64_t, int64_t> first_rows;
  int64_t next = 0;
  for (const auto& [key, micro_batch] : micro_batches(calls)) {
    first_rows[key] = next;
    next += micro_batch.samples.guard_int(__FILE__, __LINE__);
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
  scale_ = at::scalar_tensor(scale, calls[0].output_gradient.options().dtype(at::kDouble));
  if (loss_scale.defined()) {
    scale_.div_(loss_scale);
  }
}

at::Tensor Jacobian::gram(at::ArrayRef<double> weights) const {
  at::Tensor K = at::zeros({samples_, samples_}, scale_.options());
  std::vector<bool> done(columns_.size(), false);
  for (size_t p = 0; p < columns_.size(); ++p) {
    const auto& column = columns_[p];
    if (column.shared_bias >= 0) {
      done[p] = column.block->add_gram_with_bias_(K, weights[p], weights[column.shared_bias]);
      done[column.shared_bias] = done[p];
    }
  }
  for (size_t p = 0; p < columns_.size(); ++p) {
    if (columns_[p].block && !done[p]) {
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
    const auto& [dtype, shape, block, bias] = columns_[p];
    if (!block) {
      result.push_back(at::zeros(shape, scale_.options().dtype(dtype)));
      continue;
    }
    const at::Tensor of_column = scales.empty() ? scaled : scaled * scales[p];
    result.push_back(block->transpose_product(of_column.to(dtype)));
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

at::Tensor Jacobian::norms(int64_t max_workspace_bytes) const {
  at::Tensor squares = at::zeros({samples_}, scale_.options());
  for (const auto& column : columns_) {
    if (column.block) {
      column.block->add_squared_norms_(squares, max_workspace_bytes);
    }
  }
  return squares.sqrt_().mul_(scale_);
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
