#include "optim/natural_gradient/sharing/call_lists.h"

#include "distributed/step_agreement.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

namespace torchium::optim::detail {
namespace {

using distributed::Message;
using gradients::detail::kCallRowSize;
using gradients::detail::LayerCall;

// ---- a list as integers

void add_message(std::vector<int64_t>& text, const Message& message, int64_t layer) {
  text.insert(text.end(), {static_cast<int64_t>(message.dtype), layer,
                           static_cast<int64_t>(message.sizes.size())});
  text.insert(text.end(), message.sizes.begin(), message.sizes.end());
}

void add_call(std::vector<int64_t>& text, const LayerCall& call, const CallList::Tensors& tensors) {
  text.insert(text.end(),
              {static_cast<int64_t>(call.kind), call.weight, call.bias, call.micro_batch});
  text.insert(text.end(), call.settings.begin(), call.settings.end());
  text.insert(text.end(), {std::bit_cast<int64_t>(call.eps), static_cast<int64_t>(tensors.input),
                           static_cast<int64_t>(tensors.gradient)});
}

std::vector<int64_t> as_integers(const CallList& list) {
  std::vector<int64_t> text{static_cast<int64_t>(list.messages.size()),
                            static_cast<int64_t>(list.calls.size())};
  for (const auto i : c10::irange(list.messages.size())) {
    add_message(text, list.messages[i], list.layers[i]);
  }
  for (const auto i : c10::irange(list.calls.size())) {
    add_call(text, list.calls[i], list.tensors[i]);
  }
  return text;
}

CallList list_from(const int64_t* text, int64_t rank) {
  CallList list;
  const int64_t messages = *text++;
  const int64_t calls = *text++;
  for ([[maybe_unused]] const auto i : c10::irange(messages)) {
    Message& message = list.messages.emplace_back();
    message.from = rank;
    message.dtype = static_cast<at::ScalarType>(text[0]);
    list.layers.push_back(text[1]);
    message.sizes.assign(text + 3, text + 3 + text[2]);
    text += 3 + text[2];
  }
  for ([[maybe_unused]] const auto i : c10::irange(calls)) {
    list.calls.push_back(gradients::detail::call_from_row(text));
    text += kCallRowSize;
    list.calls.back().eps = std::bit_cast<double>(text[0]);
    list.tensors.push_back({static_cast<size_t>(text[1]), static_cast<size_t>(text[2])});
    text += 3;
  }
  return list;
}

}  // namespace

std::vector<int64_t> CallList::samples() const {
  std::vector<int64_t> result;
  for (const auto i : c10::irange(calls.size())) {
    const auto micro_batch = static_cast<size_t>(calls[i].micro_batch);
    result.resize(std::max(result.size(), micro_batch + 1), 0);
    result[micro_batch] = gradients::detail::samples_of(calls[i], messages[tensors[i].input].sizes);
  }
  return result;
}

OwnCalls list_of(const std::vector<LayerCall>& calls, int64_t rank) {
  OwnCalls own;
  CallList& list = own.list;
  std::map<std::pair<int64_t, const at::TensorImpl*>, size_t> known;  // by layer
  const auto message_of = [&](const at::Tensor& tensor, int64_t layer) {
    const auto [found, is_new] =
        known.try_emplace({layer, tensor.unsafeGetTensorImpl()}, list.messages.size());
    if (is_new) {
      list.messages.push_back({rank, 0, 0, tensor.scalar_type(), tensor.sizes().vec()});
      list.layers.push_back(layer);
      own.tensors.push_back(tensor);
    }
    return found->second;
  };
  for (const LayerCall& call : calls) {
    const int64_t layer = owner_of(call);
    list.tensors.push_back(
        {message_of(call.input, layer), message_of(call.output_gradient, layer)});
    list.calls.push_back(call);
    list.calls.back().input.reset();
    list.calls.back().output_gradient.reset();
  }
  return own;
}

int64_t hash_of(const CallList& list) {
  distributed::Hash hash;
  for (const int64_t number : as_integers(list)) {
    hash.add(number);
  }
  return static_cast<int64_t>(hash.value() >> 1);
}

std::vector<CallList> gather_lists(const distributed::Communicator& ranks, const CallList& own) {
  std::vector<int64_t> text = as_integers(own);
  text.resize(ranks.all_reduce_max({static_cast<int64_t>(text.size())})[0], 0);
  std::vector<CallList> lists;
  for (const auto& of_rank : ranks.all_gather(text)) {
    lists.push_back(list_from(of_rank.data(), static_cast<int64_t>(lists.size())));
  }
  return lists;
}

}  // namespace torchium::optim::detail
