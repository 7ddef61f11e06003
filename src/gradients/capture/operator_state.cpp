#include "gradients/capture/operator_state.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <utility>

namespace torchium::gradients::detail {

void OperatorCapture::warn_of_gradients_without_calls() {
  state_->warn_of_gradients_without_calls();
}

void OperatorCapture::forget() {
  const std::lock_guard lock(state_->mutex);
  state_->forget();
  state_->processes = 1;
}

void OperatorCapture::raise_error() {
  std::exception_ptr error;
  {
    const std::lock_guard lock(state_->mutex);
    error = std::exchange(state_->error, nullptr);
  }
  if (error != nullptr) {
    std::rethrow_exception(error);
  }
}

int64_t OperatorCapture::processes() const {
  const std::lock_guard lock(state_->mutex);
  return state_->processes;
}

bool OperatorCapture::mixes_samples(int64_t pass) const {
  const std::lock_guard lock(state_->mutex);
  return state_->mixes_samples(pass);
}

bool OperatorCapture::is_used_otherwise(const at::Tensor& param) const {
  const std::lock_guard lock(state_->mutex);
  return state_->uncaptured.has_found(param);
}

int64_t OperatorCapture::parameter_used_otherwise(const at::Tensor& loss) const {
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->uncaptured.find(loss);
  for (const auto i : c10::irange(static_cast<int64_t>(state_->size()))) {
    if (found.count(state_->param(i).unsafeGetTensorImpl()) != 0) {
      return i;
    }
  }
  return -1;
}

bool OperatorCapture::has_overwritten_input() const {
  const std::lock_guard lock(state_->mutex);
  return std::any_of(state_->calls.begin(), state_->calls.end(), [](const auto& call) {
    const at::Tensor& input = call->layer.input;
    return !input.is_inference() && input._version() != call->input_version;
  });
}

std::vector<DifferentiableCall> OperatorCapture::calls_of(const at::Tensor& outputs) const {
  return state_->calls_of(outputs);
}

std::vector<LayerCall> OperatorCapture::differentiate(const at::Tensor& losses,
                                                      const at::Tensor& factors, bool keep) {
  const std::lock_guard lock(state_->mutex);
  const auto pending = state_->calls;
  const auto outputs = state_->outputs;
  if (!keep) {
    state_->calls.clear();
    state_->outputs.clear();
  }
  std::vector<LayerCall> calls;
  for (const auto& call : pending) {
    calls.push_back(call->layer);
  }
  if (!losses.defined() || !losses.requires_grad() || calls.empty()) {
    return calls;
  }
  const auto gradients = gradients_at(
      outputs, losses, factors.defined() ? factors : at::ones_like(losses), /*keep_graph=*/keep);
  for (size_t i = 0; i < pending.size(); ++i) {
    if (gradients[i].defined()) {
      calls[i].output_gradient = gradients[i].reshape(pending[i]->output_sizes);
    }
  }
  return calls;
}

}  // namespace torchium::gradients::detail
