// What an optimizer class hands to one call of the core.
#pragma once

#include "torchium/optim/second_order_optimizer.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// Parameters on one device, of one group or of all. All lists have one entry a parameter.
struct GroupStep {
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;
  std::vector<SecondOrderParamState*> states;
  at::Tensor lr;                    // 0-dim, of the group
  at::Tensor status;                // step_status.h
  std::vector<int64_t> host_steps;  // empty where the core reads `step` itself
};

// One member of all states.
template <typename State>
std::vector<at::Tensor> member_list(const std::vector<SecondOrderParamState*>& states,
                                    at::Tensor& (State::*member)() noexcept) {
  std::vector<at::Tensor> list;
  list.reserve(states.size());
  for (auto* state : states) {
    list.push_back((static_cast<State*>(state)->*member)());
  }
  return list;
}

// Zeros with the shape and memory format of the parameter, in its state dtype.
at::Tensor parameter_shaped_zeros(const at::Tensor& param);

// The parameters of each device, in order.
std::vector<std::pair<c10::Device, std::vector<at::Tensor>>> split_by_device(
    std::vector<at::Tensor> params);

}  // namespace torchium::optim::detail
