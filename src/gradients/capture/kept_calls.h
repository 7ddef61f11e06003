// Layer calls with their gradients, by backward pass.
#pragma once

#include "gradients/capture/layer_call.h"
#include "support/tensor_version.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

namespace torchium::gradients::detail {

struct KeptCall {
  explicit KeptCall(LayerCall layer, int64_t module = -1)
      : layer(std::move(layer)),
        module(module),
        input_version(torchium::detail::version_of(this->layer.input)) {}

  bool has_changed_input() const {
    return torchium::detail::version_of(layer.input) != input_version;
  }

  // Raises ValueError, which asks for other tensors until `until`.
  void check_input(const char* until) const {
    TORCH_CHECK_VALUE(!has_changed_input(), "the input ", layer.input.sizes(), " of a ",
                      name_of(layer.kind),
                      " layer was changed in place after the backward pass; fill another tensor "
                      "with the next batch until ",
                      until);
  }

  LayerCall layer;
  int64_t module;  // a number of the caller's, or -1
  int64_t input_version;
};
using KeptCalls = std::map<int64_t, std::vector<KeptCall>>;  // by micro-batch

// Adds what a capture has received. Drops the calls of passes whose gradients are gone
// (OperatorCapture::Receiver). A pass that is joined to an earlier one, because both are of the
// same samples, moves there: it may have reached calls before it met an earlier one, such as those
// of another head. Returns the calls of its pass.
inline std::vector<KeptCall>& keep_call(KeptCalls& passes, KeptCall call,
                                        const std::vector<int64_t>& gone_passes) {
  for (const int64_t pass : gone_passes) {
    passes.erase(pass);
  }
  LayerCall& layer = call.layer;
  if (layer.first_pass >= 0 && layer.first_pass != layer.micro_batch) {
    if (const auto own = passes.extract(layer.micro_batch)) {
      auto& first = passes[layer.first_pass];
      std::move(own.mapped().begin(), own.mapped().end(), std::back_inserter(first));
    }
    layer.micro_batch = layer.first_pass;
  }
  auto& calls = passes[layer.micro_batch];
  calls.push_back(std::move(call));
  return calls;
}

}  // namespace torchium::gradients::detail
