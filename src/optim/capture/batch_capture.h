// The batch of a natural gradient step: what all layers have seen.
#pragma once

#include "gradients/capture/layer_call.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace torchium::gradients::detail {
class OperatorCapture;
}

namespace torchium::optim::detail {

// Uses in the order of their micro-batches, which count from 0. Weights and biases are positions in
// the parameters of all groups.
struct KeptBatch {
  std::vector<gradients::detail::LayerCall> calls;

  int64_t samples() const;
  // The same with positions in another list of parameters; `position(i)` is -1 for one that is not
  // in it.
  template <typename Position>
  std::vector<gradients::detail::LayerCall> calls_in(Position&& position) const {
    auto result = calls;
    for (auto& call : result) {
      call.weight = call.weight < 0 ? -1 : position(call.weight);
      call.bias = call.bias < 0 ? -1 : position(call.bias);
    }
    return result;
  }
};

class BatchCapture {
 public:
  BatchCapture();
  ~BatchCapture();

  // Watches these parameters, and no others from now on.
  void watch(const std::vector<at::Tensor>& params);
  void set_enabled(bool enabled);
  // What was captured, as far as it belongs to `active` parameters; one entry a watched parameter.
  // Throws c10::ValueError if an input was changed in place since.
  KeptBatch batch(const std::vector<bool>& active) const;
  void forget();
  void raise_error();
  // OperatorCapture's.
  int64_t processes() const;
  bool is_used_otherwise(int64_t param) const;
  // Whether one of the captured backward passes does (OperatorCapture).
  bool mixes_samples() const;

 private:
  struct Data;
  std::shared_ptr<Data> data_;
  std::unique_ptr<gradients::detail::OperatorCapture> capture_;
};

}  // namespace torchium::optim::detail
