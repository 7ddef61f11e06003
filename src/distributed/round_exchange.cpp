#include "distributed/round_exchange.h"

#include "distributed/alignment.h"
#include "distributed/ownership.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

namespace torchium::distributed {
namespace {

// Parcels of one round on their way.
struct Travel {
  at::Tensor outgoing, incoming;
  std::vector<std::pair<size_t, int64_t>> arrivals;  // parcels, and where they begin
  std::function<void()> wait;
};

at::Tensor parcel_in(const at::Tensor& bytes, int64_t offset, const Parcel& parcel) {
  return bytes.narrow(0, offset, parcel.bytes()).view(parcel.dtype).view(parcel.sizes);
}

// Parts lie in the order of the ranks on the other side, and of the parcels of each.
Travel begin(const Communicator& ranks, const std::vector<Parcel>& parcels, size_t round,
             const std::vector<at::Tensor>& own, c10::Device device) {
  const int64_t me = ranks.rank();
  Travel travel;
  std::vector<int64_t> sent, received;
  std::vector<std::pair<size_t, int64_t>> departures;
  int64_t outgoing = 0, incoming = 0;
  for (int64_t rank = 0; rank < ranks.size(); ++rank) {
    const int64_t sent_before = outgoing, received_before = incoming;
    for (size_t i = 0; i < parcels.size(); ++i) {
      const Parcel& parcel = parcels[i];
      if (parcel.round != round || parcel.from == parcel.to) {
        continue;
      }
      if (parcel.from == me && parcel.to == rank) {
        departures.emplace_back(i, outgoing);
        outgoing += aligned(parcel.bytes());
      } else if (parcel.from == rank && parcel.to == me) {
        travel.arrivals.emplace_back(i, incoming);
        incoming += aligned(parcel.bytes());
      }
    }
    sent.push_back(outgoing - sent_before);
    received.push_back(incoming - received_before);
  }
  const auto options = at::TensorOptions(device).dtype(at::kByte);
  travel.outgoing = at::zeros({outgoing}, options);
  travel.incoming = at::empty({incoming}, options);
  for (const auto& [i, offset] : departures) {
    parcel_in(travel.outgoing, offset, parcels[i]).copy_(own[i]);
  }
  travel.wait = ranks.begin_exchange(travel.outgoing, sent, travel.incoming, received);
  return travel;
}

}  // namespace

int64_t Parcel::bytes() const {
  return c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
}

Deliveries deliveries(const std::vector<int64_t>& costs, const std::vector<int64_t>& bytes,
                      int64_t ranks, int64_t most_bytes) {
  std::vector<Block> blocks;
  for (size_t part = 0; part < costs.size(); ++part) {
    blocks.push_back({static_cast<int64_t>(part), whole({1}), /*slot=*/-1, costs[part]});
  }
  Deliveries result;
  result.owners = assign_owners(blocks, std::vector<std::vector<Source>>(costs.size()), ranks);
  std::vector<size_t> round(ranks, 0);
  std::vector<int64_t> filled(ranks, 0);
  for (size_t part = 0; part < costs.size(); ++part) {
    const int64_t owner = result.owners[part];
    if (filled[owner] > 0 && filled[owner] + bytes[part] > most_bytes) {
      ++round[owner];
      filled[owner] = 0;
    }
    filled[owner] += bytes[part];
    result.rounds.push_back(round[owner]);
    result.round_count = std::max(result.round_count, round[owner] + 1);
  }
  return result;
}

void exchange_in_rounds(
    const Communicator& ranks, const std::vector<Parcel>& parcels, size_t rounds,
    const std::vector<at::Tensor>& own, c10::Device device,
    const std::function<void(size_t round, const std::vector<at::Tensor>& tensors)>& take) {
  Travel next;
  for (size_t round = 0; round < rounds; ++round) {
    const Travel travel = round == 0 ? begin(ranks, parcels, 0, own, device) : std::move(next);
    travel.wait();
    if (round + 1 < rounds) {
      next = begin(ranks, parcels, round + 1, own, device);
    }
    std::vector<at::Tensor> tensors(parcels.size());
    for (size_t i = 0; i < parcels.size(); ++i) {
      if (parcels[i].round == round && parcels[i].from == ranks.rank() &&
          parcels[i].to == ranks.rank()) {
        tensors[i] = own[i];
      }
    }
    for (const auto& [i, offset] : travel.arrivals) {
      tensors[i] = parcel_in(travel.incoming, offset, parcels[i]);
    }
    take(round, tensors);
  }
}

}  // namespace torchium::distributed
