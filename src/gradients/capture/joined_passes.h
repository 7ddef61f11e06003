// Calls by backward pass, where passes over one graph are of the same samples.
#pragma once

#include "gradients/capture/layer_call.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <vector>

namespace torchium::gradients::detail {

// Moves what was recorded of the call's pass to the pass that it is joined to, which becomes the
// call's micro-batch. The pass may have reached calls before it met an earlier one, such as those
// of another head.
template <typename Recorded>
void join_passes(std::map<int64_t, std::vector<Recorded>>& passes, LayerCall& call) {
  if (call.first_pass < 0 || call.first_pass == call.micro_batch) {
    return;
  }
  if (const auto own = passes.extract(call.micro_batch)) {
    auto& first = passes[call.first_pass];
    std::move(own.mapped().begin(), own.mapped().end(), std::back_inserter(first));
  }
  call.micro_batch = call.first_pass;
}

}  // namespace torchium::gradients::detail
