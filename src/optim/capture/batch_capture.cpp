#include "optim/capture/batch_capture.h"

#include "gradients/capture/operator_capture.h"
#include "gradients/jacobian/jacobian.h"

#include <algorithm>
#include <map>
#include <utility>

namespace torchium::optim::detail {

using gradients::detail::CapturedCall;
using gradients::detail::LayerCall;
using gradients::detail::OperatorCapture;

int64_t KeptBatch::samples() const { return gradients::detail::count_samples(calls).expect_int(); }

// Shared with the capture, whose backward passes may run on other threads.
struct BatchCapture::Data {
  struct Entry {
    LayerCall call;
    int64_t input_version;
  };
  std::map<int64_t, std::vector<Entry>> passes;  // by micro-batch

  void receive(CapturedCall captured);
};

void BatchCapture::Data::receive(CapturedCall captured) {
  LayerCall& call = captured.call;
  for (const int64_t pass : captured.gone_passes) {
    passes.erase(pass);
  }
  const int64_t version = call.input._version();
  passes[call.micro_batch].push_back({std::move(call), version});
}

BatchCapture::BatchCapture() : data_(std::make_shared<Data>()) {}
BatchCapture::~BatchCapture() = default;

void BatchCapture::watch(const std::vector<at::Tensor>& params) {
  if (capture_ != nullptr && capture_->watches(params)) {
    return;
  }
  capture_ = nullptr;
  data_->passes.clear();
  capture_ = std::make_unique<OperatorCapture>(
      params, [data = data_](CapturedCall captured) { data->receive(std::move(captured)); });
}

void BatchCapture::set_enabled(bool enabled) { capture_->set_enabled(enabled); }

bool BatchCapture::mixes_samples() const {
  return std::any_of(data_->passes.begin(), data_->passes.end(),
                     [&](const auto& entry) { return capture_->mixes_samples(entry.first); });
}

KeptBatch BatchCapture::batch(const std::vector<bool>& active) const {
  const auto kept = [&](int64_t param) { return param >= 0 && active[param] ? param : -1; };
  KeptBatch batch;
  int64_t micro_batch = 0;
  for (const auto& [pass, entries] : data_->passes) {
    const size_t before = batch.calls.size();
    for (const auto& [call, input_version] : entries) {
      const int64_t weight = kept(call.weight);
      const int64_t bias = kept(call.bias);
      if (weight < 0 && bias < 0) {
        continue;
      }
      TORCH_CHECK_VALUE(call.input._version() == input_version, "the input ", call.input.sizes(),
                        " of a ", gradients::detail::name_of(call.kind),
                        " layer was changed in place after the backward pass; fill another tensor "
                        "with the next batch until step() has been called");
      batch.calls.push_back(call);
      batch.calls.back().weight = weight;
      batch.calls.back().bias = bias;
      batch.calls.back().micro_batch = micro_batch;
    }
    micro_batch += batch.calls.size() > before ? 1 : 0;
  }
  return batch;
}

void BatchCapture::forget() {
  data_->passes.clear();
  capture_->forget();
}

void BatchCapture::raise_error() { capture_->raise_error(); }

int64_t BatchCapture::processes() const { return capture_->processes(); }

bool BatchCapture::is_used_otherwise(int64_t param) const {
  return capture_->is_used_otherwise(param);
}

}  // namespace torchium::optim::detail
