#include "optim/natural_gradient/parameter_space.h"

#include "linalg/products/symmetric_update.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

namespace torchium::optim::detail {
namespace {

using gradients::detail::LayerCall;

CapturedBatch narrowed(const CapturedBatch& batch, std::vector<LayerCall> calls, int64_t first,
                       int64_t count) {
  for (LayerCall& call : calls) {
    call.input = call.input.narrow(0, first, count);
    call.output_gradient = call.output_gradient.narrow(0, first, count);
  }
  return {.calls = std::move(calls), .scale = batch.scale, .loss_scale = batch.loss_scale};
}

// Batches of at most `most` rows, or of one sample each.
std::vector<CapturedBatch> chunks_of(const CapturedBatch& batch, int64_t most) {
  std::vector<CapturedBatch> chunks;
  if (!batch.given_rows.empty()) {
    for (int64_t first = 0; first < batch.given_rows[0].size(0); first += most) {
      const int64_t count = std::min(most, batch.given_rows[0].size(0) - first);
      CapturedBatch& chunk = chunks.emplace_back();
      for (const at::Tensor& rows : batch.given_rows) {
        chunk.given_rows.push_back(rows.narrow(0, first, count));
      }
    }
    return chunks;
  }
  std::map<int64_t, std::vector<LayerCall>> micro_batches;
  for (const LayerCall& call : batch.calls) {
    micro_batches[call.micro_batch].push_back(call);
  }
  for (auto& [key, calls] : micro_batches) {
    const int64_t samples = gradients::detail::samples_of(calls[0]).expect_int();
    if (samples <= most) {
      chunks.push_back(
          {.calls = std::move(calls), .scale = batch.scale, .loss_scale = batch.loss_scale});
      continue;
    }
    for (int64_t first = 0; first < samples; first += most) {
      chunks.push_back(narrowed(batch, calls, first, std::min(most, samples - first)));
    }
  }
  return chunks;
}

}  // namespace

at::Tensor checked_cholesky(const at::Tensor& A) {
  const auto [L, info] = at::linalg_cholesky_ex(A);
  // cuSOLVER's factor lies in columns; the fake implementation promises rows.
  return at::where(info == 0, L, std::numeric_limits<double>::quiet_NaN()).contiguous();
}

at::Tensor explicit_factor(at::TensorList params, const CapturedBatch& batch, int64_t n,
                           const NaturalGradientHyperparameters& h) {
  // The dampings are those of one rank alone, because F is the sum over all of them.
  const bool is_first = !batch.shared || batch.shared->first() == 0;
  std::vector<at::Tensor> diagonal;
  for (const auto p : c10::irange(params.size())) {
    diagonal.push_back(at::full({params[p].numel()}, is_first ? h.dampings[p] : 0.0,
                                params[p].options().dtype(at::kDouble)));
  }
  at::Tensor F = at::diag_embed(at::cat(diagonal)).unsqueeze(0);
  const int64_t P = F.size(1);
  constexpr int64_t kBytes = 16;  // of an element of J with its copy
  const int64_t most =
      std::max<int64_t>(1, h.max_workspace_bytes / kBytes / std::max<int64_t>(P, 1));
  for (const CapturedBatch& chunk : chunks_of(batch, most)) {
    std::vector<at::Tensor> rows;
    for (const at::Tensor& of_param : chunk.jacobian(params).rows()) {
      rows.push_back(of_param.unsqueeze(-1).flatten(1).to(at::kDouble));
    }
    linalg::detail::symmetric_update_(F, at::cat(rows, 1).mT().unsqueeze(0), 1.0,
                                      1.0 / static_cast<double>(n));
  }
  if (batch.shared) {
    batch.shared->ranks().all_reduce_sum_(F);
  }
  return checked_cholesky(F[0]);
}

ParameterVector explicit_direction(const ParameterSegments& segments,
                                   const std::vector<double>& dampings, const ParameterVector& v,
                                   const ScaledVector& previous, const at::Tensor& L) {
  at::Tensor right = segments.flatten(v, at::kDouble);
  if (!previous.x.empty()) {
    ParameterVector damped;
    for (const auto s : c10::irange(v.size())) {
      damped.push_back(previous.x[s] * (previous.scales[s] * dampings[s]));
    }
    right = right + segments.flatten(damped, at::kDouble);
  }
  return segments.unflatten(at::cholesky_solve(right.unsqueeze(1), L).squeeze(1), v);
}

}  // namespace torchium::optim::detail
