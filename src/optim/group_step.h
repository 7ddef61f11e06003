// What an optimizer class hands to one call of the core.
#pragma once

#include "torchium/optim/second_order_optimizer.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// Parameters on one device, of one group or of all. All lists have one entry a parameter.
struct GroupStep {
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;  // not used by an update of the roots alone
  std::vector<SecondOrderParamState*> states;
  at::Tensor lr;                    // 0-dim, of the group
  at::Tensor status;                // step_status.h
  std::vector<int64_t> host_steps;  // empty where the core reads `step` itself
};

// The matrices of all slots, in (parameter, slot) order.
struct MatrixLists {
  std::vector<at::Tensor> statistics;
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> root_failures;
};
MatrixLists matrix_lists(const std::vector<SecondOrderParamState*>& states);

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

// The same of a member: of all states, created where absent.
template <typename State>
std::vector<at::Tensor> created_member_list(const GroupStep& step,
                                            at::Tensor& (State::*member)() noexcept) {
  for (size_t i = 0; i < step.states.size(); ++i) {
    at::Tensor& tensor = (static_cast<State*>(step.states[i])->*member)();
    if (!tensor.defined()) {
      tensor = parameter_shaped_zeros(step.params[i]);
    }
  }
  return member_list(step.states, member);
}

// Creates an average of the parameters that have none, though they have state: its `start` is the
// number of steps they have taken.
template <typename State>
void start_late(const GroupStep& step, at::Tensor& (State::*average)() noexcept,
                at::Tensor& (State::*start)() noexcept) {
  for (size_t i = 0; i < step.states.size(); ++i) {
    auto& state = static_cast<State&>(*step.states[i]);
    if (!(state.*average)().defined()) {
      (state.*average)() = parameter_shaped_zeros(step.params[i]);
      (state.*start)() = state.step().clone();
    }
  }
}

// Removes an average that no option needs now: it would be of old gradients alone when one does
// again.
template <typename State>
void drop(const GroupStep& step, at::Tensor& (State::*average)() noexcept,
          at::Tensor& (State::*start)() noexcept) {
  for (SecondOrderParamState* each : step.states) {
    auto& state = static_cast<State&>(*each);
    (state.*average)().reset();
    (state.*start)().reset();
  }
}

// The starts of all states, 0 where there is none; empty where no state has one.
template <typename State>
std::vector<at::Tensor> start_list(const std::vector<SecondOrderParamState*>& states,
                                   at::Tensor& (State::*start)() noexcept) {
  auto list = member_list(states, start);
  const bool any = std::any_of(list.begin(), list.end(), [](const auto& t) { return t.defined(); });
  if (!any) {
    return {};
  }
  for (size_t i = 0; i < list.size(); ++i) {
    list[i] = list[i].defined() ? list[i] : states[i]->step().new_zeros({});
  }
  return list;
}

// The parameters of each device, in order.
std::vector<std::pair<c10::Device, std::vector<at::Tensor>>> split_by_device(
    std::vector<at::Tensor> params);

}  // namespace torchium::optim::detail
