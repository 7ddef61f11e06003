#include "distributed/tensor_exchange.h"

#include "distributed/buffer_layout.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace torchium::distributed {
namespace {

using Tensors = std::vector<at::Tensor>;

// Copies of tensors, launched together.
struct Copies {
  Tensors targets, sources;

  void run() const {
    if (!targets.empty()) {
      at::_foreach_copy_(targets, sources);
    }
  }
};

// The places of tensors in the memory of a message.
Tensors places_in(const at::Tensor& memory, const Tensors& tensors) {
  Tensors places;
  int64_t first = 0;
  for (const at::Tensor& tensor : tensors) {
    places.push_back(view_in(memory, first, tensor.scalar_type(), tensor.sizes()));
    first += aligned(static_cast<int64_t>(tensor.nbytes()));
  }
  return places;
}

void append(Tensors& all, const Tensors& more) { all.insert(all.end(), more.begin(), more.end()); }

// Whether every message goes from one rank to all others.
bool go_to_all(const std::vector<TensorExchange::Message>& messages, int64_t ranks) {
  return std::ranges::all_of(messages, [&](const auto& message) {
    return !message.routes.empty() && static_cast<int64_t>(message.routes.size()) == ranks - 1 &&
           std::ranges::all_of(message.routes, [&](const auto& route) {
             return route.from == message.routes[0].from;
           });
  });
}

}  // namespace

int64_t packed_bytes(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    bytes += aligned(static_cast<int64_t>(tensor.nbytes()));
  }
  return bytes;
}

TensorExchange::TensorExchange(const Communicator& communicator, std::vector<Message> messages,
                               c10::Device device)
    : rank_(communicator.rank()), messages_(std::move(messages)) {
  if (go_to_all(messages_, communicator.size())) {
    std::vector<UpdateExchange::Part> parts;
    for (const Message& message : messages_) {
      parts.push_back({message.routes[0].from, message.bytes});
    }
    gathered_.emplace(communicator, parts, at::kByte, at::kByte, kBucketBytes, device);
    return;
  }
  std::vector<PartExchange::Transfer> transfers;
  for (size_t p = 0; p < messages_.size(); ++p) {
    for (const Route& route : messages_[p].routes) {
      transfers_.emplace_back(p, route);
      transfers.push_back({route.from, route.to, messages_[p].bytes});
    }
  }
  sent_.emplace(communicator, transfers, at::kByte, at::kByte, kBucketBytes, device);
}

void TensorExchange::run(const std::function<Tensors(size_t)>& tensors) const {
  Copies outgoing;
  const auto send = [&](size_t message, const at::Tensor& memory) {
    const Tensors own = tensors(message);
    append(outgoing.targets, places_in(memory, own));
    append(outgoing.sources, own);
  };
  const auto receive = [&](size_t message, const at::Tensor& memory, Copies& incoming) {
    const Tensors own = tensors(message);
    append(incoming.targets, own);
    append(incoming.sources, places_in(memory, own));
  };
  if (gathered_) {
    for (size_t p = 0; p < messages_.size(); ++p) {
      if (messages_[p].routes[0].from == rank_) {
        send(p, gathered_->own(p));
      }
    }
    outgoing.run();
    gathered_->run(/*stage=*/0, [&](const std::vector<UpdateExchange::Update>& arrivals) {
      Copies incoming;
      for (const auto& [message, memory] : arrivals) {
        if (messages_[message].routes[0].from != rank_) {
          receive(message, memory, incoming);
        }
      }
      incoming.run();
    });
    return;
  }
  for (size_t t = 0; t < transfers_.size(); ++t) {
    if (transfers_[t].second.from == rank_) {
      send(transfers_[t].first, sent_->outgoing(t));
    }
  }
  outgoing.run();
  sent_->run([&](const std::vector<PartExchange::Arrival>& arrivals) {
    Copies incoming;
    for (const auto& [transfer, memory] : arrivals) {
      receive(transfers_[transfer].first, memory, incoming);
    }
    incoming.run();
  });
}

}  // namespace torchium::distributed
