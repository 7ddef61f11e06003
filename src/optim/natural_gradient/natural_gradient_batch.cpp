// Sources of the matrix of the next step: layer calls of backward passes, columns of a
// curvature, or a Jacobian that the caller has given.
#include "gradients/per_sample/sample_checks.h"
#include "optim/natural_gradient/natural_gradient_plan.h"
#include "optim/natural_gradient/sharing/shared_rows.h"
#include "support/tensor_version.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace torchium::optim::detail {
namespace {

using gradients::detail::KeptCall;
using gradients::detail::LayerCall;
using torchium::detail::version_of;

// F = S^T S / N for the columns S of N samples is J^T J / R for R rows J = sqrt(R / N) S.
void average_over_samples(KeptBatch& batch) {
  const double R = static_cast<double>(batch.rows());
  const double N = static_cast<double>(batch.curvature_samples);
  scale_gradients(batch, 1.0 / std::sqrt(R * N));
}

void check_residuals(const at::Tensor& residuals, const at::Tensor& rows) {
  TORCH_CHECK_VALUE(residuals.dim() == 1 && residuals.size(0) == rows.size(0) &&
                        at::isFloatingType(residuals.scalar_type()) &&
                        residuals.device() == rows.device(),
                    "residuals must be a real floating-point tensor [", rows.size(0), "] on ",
                    rows.device(), ", one for each row, got ", residuals.scalar_type(),
                    residuals.sizes(), " on ", residuals.device());
}

}  // namespace

void NaturalGradientPlan::receive(LayerCall call, const std::vector<int64_t>& gone_passes) {
  const std::array params{call.weight, call.bias};
  auto& pass = keep_call(passes_, KeptCall(std::move(call)), gone_passes);
  if (takes_curvature()) {
    pass.clear();  // it is only a sign of the backward pass
    note_reached(params);
  }
}

void NaturalGradientPlan::note_reached(at::IntArrayRef params) {
  reached_.insert(params.begin(), params.end());
}

void NaturalGradientPlan::forget() {
  refresh_.reset();  // no calls of this step are recorded yet
  passes_.clear();
  reached_.clear();
  columns_.clear();
  curvature_batches_.forget();
  given_ = nullptr;
  given_versions_.clear();
  batch_ = nullptr;
}

std::vector<int64_t> NaturalGradientPlan::passes() const {
  std::vector<int64_t> result;
  for (const auto& [pass, recorded] : passes_) {
    result.push_back(pass);
  }
  return result;
}

// The recorded calls of active parameters.
std::shared_ptr<const KeptBatch> NaturalGradientPlan::recorded_batch(
    const std::vector<size_t>& active) const {
  const auto reached = [&](int64_t i) {
    return i >= 0 && std::binary_search(active.begin(), active.end(), static_cast<size_t>(i)) ? i
                                                                                              : -1;
  };
  auto batch = std::make_shared<KeptBatch>();
  if (is_shared()) {
    batch->rank = ranks().rank();
    batch->ranks = ranks().size();
  }
  int64_t micro_batch = 0;
  for (const auto& [pass, recorded] : takes_curvature() ? columns_ : passes_) {
    const size_t before = batch->calls.size();
    for (const KeptCall& kept : recorded) {
      const LayerCall& call = kept.layer;
      const int64_t weight = reached(call.weight);
      const int64_t bias = reached(call.bias);
      if (weight < 0 && bias < 0) {
        continue;
      }
      kept.check_input("step() has been called");
      batch->calls.push_back(call);
      batch->calls.back().weight = weight;
      batch->calls.back().bias = bias;
      batch->calls.back().micro_batch = micro_batch;
    }
    micro_batch += batch->calls.size() > before ? 1 : 0;
  }
  if (takes_curvature() && !batch->calls.empty()) {
    batch->curvature_samples = curvature_batches_.samples();
    average_over_samples(*batch);
  }
  return batch;
}

void NaturalGradientPlan::add_curvature(const at::Tensor& outputs, const LossCurvature& curvature,
                                        std::vector<gradients::detail::DifferentiableCall> calls) {
  const auto first = static_cast<int64_t>(columns_.size());
  check_curvature_rows(outputs, curvature, calls);
  const CurvatureBatch batch = curvature_batches_.add(calls, curvature.samples());
  for_each_curvature_gradient(outputs, curvature, batch.scale, calls,
                              [&](int64_t k, size_t /*i*/, LayerCall call) {
                                call.micro_batch = first + k;
                                columns_[call.micro_batch].emplace_back(std::move(call));
                              });
}

// A row of J is of one sample: of several, a column would add up their rows, with cross terms that
// only the mean over sampled targets does not have. check_samples() refuses layers that disagree.
void NaturalGradientPlan::check_curvature_rows(
    const at::Tensor& outputs, const LossCurvature& curvature,
    const std::vector<gradients::detail::DifferentiableCall>& calls) const {
  std::optional<int64_t> rows;
  int64_t param = -1;
  for (const auto& [layer, output, call] : calls) {
    if (layer.weight < 0 && layer.bias < 0) {
      continue;
    }
    const auto seen = gradients::detail::samples_of(layer).expect_int();
    if (rows.value_or(seen) != seen) {
      return;
    }
    rows = seen;
    param = layer.weight >= 0 ? layer.weight : layer.bias;
  }
  if (!rows || *rows == curvature.samples()) {
    return;
  }
  TORCH_CHECK_VALUE(*rows < curvature.samples(), "the layer of ", name(param), " has seen ", *rows,
                    " samples in dimension 0 of its input, and outputs ", outputs.sizes(), " have ",
                    curvature.samples(), "; dimension 0 must be the sample in all layers");
  TORCH_CHECK_VALUE(curvature.is_sampled(), several_rows_message(*rows, outputs, name(param)));
}

void NaturalGradientPlan::require_curvature() const {
  TORCH_CHECK(!takes_curvature() || curvature_batches_.samples() > 0,
              "NaturalGradient with fisher='", fisher(),
              "' takes a new matrix in this step, but update_curvature() was not called: call it "
              "with the outputs of the model in each iteration, after zero_grad() and before "
              "step()");
}

// Refuses a batch that does not account for all gradients.
void NaturalGradientPlan::check_recorded(const KeptBatch& batch,
                                         const std::vector<size_t>& active) const {
  std::vector<bool> is_known(size(), false);
  for (const LayerCall& call : batch.calls) {
    for (const int64_t i : {call.weight, call.bias}) {
      if (i >= 0) {
        is_known[i] = !is_excluded(i);
      }
    }
  }
  for (const size_t i : active) {
    const bool needs_curvature = takes_curvature() && !is_known[i] && !is_excluded(i) &&
                                 reached_.count(static_cast<int64_t>(i)) != 0;
    TORCH_CHECK_VALUE(!needs_curvature, "the gradient of ", name(i),
                      " comes from an output of the model that no update_curvature() covers; call "
                      "update_curvature(outputs, loss) for each output that the loss uses (it does "
                      "not reach layers within torch.utils.checkpoint with use_reentrant=True), or "
                      "freeze the parameter");
  }
  TORCH_CHECK_VALUE(!batch.calls.empty(),
                    "NaturalGradient has captured no backward pass since the last step or "
                    "zero_grad(); make the optimizer before the forward pass, call backward() "
                    "once a batch, and let gradients come from layers that it knows");
  for (const size_t i : active) {
    TORCH_CHECK_VALUE(is_known[i], "the gradient of ", name(i),
                      " does not come from its layer alone, as with a function call that is not "
                      "captured, a loss of derivatives of the model or a gradient that was set by "
                      "hand; use the weight through a layer (tie it: linear.weight = "
                      "embedding.weight), pass the Jacobian of residuals to update_jacobian(), "
                      "freeze it, or add the gradient of a penalty after backward()");
  }
  gradients::detail::check_samples(batch.calls, [&](int64_t i) { return name(i); });
}

// ---- a given Jacobian

// J^T r / n, for the rows of all ranks.
std::vector<at::Tensor> NaturalGradientPlan::gradients_of_residuals(
    const std::vector<at::Tensor>& params, const std::vector<at::Tensor>& rows,
    const at::Tensor& residuals) const {
  const gradients::detail::Jacobian J(params, rows);
  const at::Tensor r = residuals.to(at::kDouble);
  if (!is_shared()) {
    return J.transpose_product(r / J.samples());
  }
  std::vector<int64_t> counts;
  for (const auto& count : ranks().all_gather({J.samples()})) {
    counts.push_back(count.front());
  }
  const SharedRows shared(ranks(), counts);
  return shared.sum(J.transpose_product(r / shared.total()));
}

void NaturalGradientPlan::set_jacobian(std::vector<at::Tensor> rows, at::Tensor residuals) {
  const c10::NoGradGuard no_grad;
  const std::vector<at::Tensor> params = all_params();
  agree_to("update_jacobian()", [&] {
    gradients::detail::check_rows(params, rows);
    check_residuals(residuals, rows[0]);
    TORCH_CHECK_VALUE(!options().empty() && options().front().update_freq() == 1,
                      "update_jacobian() needs update_freq=1: a given Jacobian is not kept");
  });
  const c10::DeviceGuard device_guard(device());
  const std::vector<at::Tensor> gradients = gradients_of_residuals(params, rows, residuals);
  for (const auto i : c10::irange(params.size())) {
    if (params[i].requires_grad()) {
      params[i].mutable_grad() = gradients[i].to(params[i].scalar_type());
    }
  }
  auto given = std::make_shared<KeptBatch>();
  given->given_rows = std::move(rows);
  given->residuals = std::move(residuals);
  given_versions_.clear();
  for (const at::Tensor& tensor : given->given_rows) {
    given_versions_.push_back(version_of(tensor));
  }
  given_versions_.push_back(version_of(given->residuals));
  given_ = std::move(given);
  batch_ = nullptr;
}

void NaturalGradientPlan::check_given() const {
  std::vector<at::Tensor> tensors = given_->given_rows;
  tensors.push_back(given_->residuals);
  for (const auto i : c10::irange(tensors.size())) {
    TORCH_CHECK_VALUE(version_of(tensors[i]) == given_versions_[i],
                      "rows or residuals of update_jacobian() were changed in place before step()");
  }
  TORCH_CHECK_VALUE(given_->given_rows.size() == size(),
                    "parameters were added after update_jacobian(); call it again");
}

}  // namespace torchium::optim::detail
