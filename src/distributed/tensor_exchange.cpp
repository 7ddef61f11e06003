#include "distributed/tensor_exchange.h"

#include "distributed/alignment.h"

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

// The places of tensors in the memory of a parcel.
Tensors places_in(const at::Tensor& memory, const Tensors& tensors) {
  Tensors places;
  int64_t first = 0;
  for (const at::Tensor& tensor : tensors) {
    const auto bytes = static_cast<int64_t>(tensor.numel() * tensor.element_size());
    places.push_back(
        memory.narrow(0, first, bytes).view(tensor.scalar_type()).view(tensor.sizes()));
    first += aligned(bytes);
  }
  return places;
}

void append(Tensors& all, const Tensors& more) { all.insert(all.end(), more.begin(), more.end()); }

// Whether every parcel goes from one rank to all others.
bool go_to_all(const std::vector<TensorExchange::Parcel>& parcels, int64_t ranks) {
  return std::ranges::all_of(parcels, [&](const auto& parcel) {
    return static_cast<int64_t>(parcel.routes.size()) == ranks - 1 &&
           std::ranges::all_of(parcel.routes, [&](const auto& route) {
             return route.from == parcel.routes[0].from;
           });
  });
}

}  // namespace

int64_t parcel_bytes(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    bytes += aligned(static_cast<int64_t>(tensor.numel() * tensor.element_size()));
  }
  return bytes;
}

TensorExchange::TensorExchange(const Communicator& communicator, std::vector<Parcel> parcels,
                               int64_t bucket_bytes, c10::Device device)
    : rank_(communicator.rank()), parcels_(std::move(parcels)) {
  if (go_to_all(parcels_, communicator.size())) {
    std::vector<UpdateExchange::Part> parts;
    for (const Parcel& parcel : parcels_) {
      parts.push_back({parcel.routes[0].from, parcel.bytes});
    }
    gathered_.emplace(communicator, parts, at::kByte, at::kByte, bucket_bytes, device);
    return;
  }
  std::vector<PartExchange::Transfer> transfers;
  for (size_t p = 0; p < parcels_.size(); ++p) {
    for (const Route& route : parcels_[p].routes) {
      transfers_.emplace_back(p, route);
      transfers.push_back({route.from, route.to, parcels_[p].bytes});
    }
  }
  sent_.emplace(communicator, transfers, at::kByte, at::kByte, bucket_bytes, device);
}

void TensorExchange::run(const std::function<Tensors(size_t)>& tensors) const {
  Copies outgoing;
  const auto send = [&](size_t parcel, const at::Tensor& memory) {
    const Tensors own = tensors(parcel);
    append(outgoing.targets, places_in(memory, own));
    append(outgoing.sources, own);
  };
  const auto receive = [&](size_t parcel, const at::Tensor& memory, Copies& incoming) {
    const Tensors own = tensors(parcel);
    append(incoming.targets, own);
    append(incoming.sources, places_in(memory, own));
  };
  if (gathered_) {
    for (size_t p = 0; p < parcels_.size(); ++p) {
      if (parcels_[p].routes[0].from == rank_) {
        send(p, gathered_->own(p));
      }
    }
    outgoing.run();
    gathered_->run([&](const std::vector<UpdateExchange::Update>& arrivals) {
      Copies incoming;
      for (const auto& [parcel, memory] : arrivals) {
        if (parcels_[parcel].routes[0].from != rank_) {
          receive(parcel, memory, incoming);
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
