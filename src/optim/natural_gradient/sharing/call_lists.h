// The captured calls of each rank, described to all ranks without their tensors.
#pragma once

#include "distributed/communicator.h"
#include "distributed/round_exchange.h"
#include "gradients/capture/layer_call.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchium::optim::detail {

// Of one rank. Calls of one parameter that have a tensor in common, such as the columns of a
// curvature with one input, name one message.
struct CallList {
  struct Tensors {
    size_t input, gradient;  // messages
  };
  std::vector<gradients::detail::LayerCall> calls;  // without tensors
  std::vector<Tensors> tensors;                     // of each call
  std::vector<distributed::Message> messages;       // receiver and round are not known yet
  std::vector<int64_t> layers;                      // of each message: owner_of() its calls

  // Samples of each micro-batch.
  std::vector<int64_t> samples() const;
};

// The parameter that stands for the layer of a call.
inline int64_t owner_of(const gradients::detail::LayerCall& call) {
  return call.weight >= 0 ? call.weight : call.bias;
}

// The list of a rank with the tensors that it names.
struct OwnCalls {
  CallList list;
  std::vector<at::Tensor> tensors;  // of its messages
};
OwnCalls list_of(const std::vector<gradients::detail::LayerCall>& calls, int64_t rank);

// Equal for equal lists, on all ranks.
int64_t hash_of(const CallList& list);

// Of all ranks.
struct JointLists {
  std::vector<CallList> of_ranks;
  int64_t hash = 0;  // of hash_of() each
};

// The lists of all ranks, which must all call this.
std::vector<CallList> gather_lists(const distributed::Communicator& ranks, const CallList& own);

}  // namespace torchium::optim::detail
