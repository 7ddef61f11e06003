#include "distributed/round_exchange.h"

#include "distributed/buffer_layout.h"
#include "distributed/ownership.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

namespace torchium::distributed {
namespace {

// Messages of one round on their way.
struct InFlight {
  at::Tensor outgoing, incoming;
  std::vector<std::pair<size_t, int64_t>> arrivals;  // messages, and where they begin
  std::function<void()> wait;
};

// Parts lie in the order of the ranks on the other side, and of the messages of each.
InFlight begin(const Communicator& ranks, const std::vector<Message>& messages, size_t round,
               const std::vector<at::Tensor>& own, c10::Device device) {
  const int64_t me = ranks.rank();
  InFlight current;
  std::vector<int64_t> sent, received;
  std::vector<std::pair<size_t, int64_t>> departures;
  int64_t outgoing = 0, incoming = 0;
  for (int64_t rank = 0; rank < ranks.size(); ++rank) {
    const int64_t sent_before = outgoing, received_before = incoming;
    for (size_t i = 0; i < messages.size(); ++i) {
      const Message& message = messages[i];
      if (message.round != round || message.from == message.to) {
        continue;
      }
      if (message.from == me && message.to == rank) {
        departures.emplace_back(i, outgoing);
        outgoing += aligned(message.bytes());
      } else if (message.from == rank && message.to == me) {
        current.arrivals.emplace_back(i, incoming);
        incoming += aligned(message.bytes());
      }
    }
    sent.push_back(outgoing - sent_before);
    received.push_back(incoming - received_before);
  }
  const auto options = at::TensorOptions(device).dtype(at::kByte);
  current.outgoing = at::zeros({outgoing}, options);
  current.incoming = at::empty({incoming}, options);
  for (const auto& [i, offset] : departures) {
    view_in(current.outgoing, offset, messages[i].dtype, messages[i].sizes).copy_(own[i]);
  }
  current.wait = ranks.begin_all_to_all(current.outgoing, sent, current.incoming, received);
  return current;
}

}  // namespace

int64_t Message::bytes() const {
  return c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
}

Assignment assign_parts(const std::vector<int64_t>& costs, const std::vector<int64_t>& bytes,
                        int64_t ranks, int64_t most_bytes) {
  std::vector<Block> blocks;
  for (size_t part = 0; part < costs.size(); ++part) {
    blocks.push_back({static_cast<int64_t>(part), whole({1}), /*slot=*/-1, costs[part]});
  }
  Assignment result;
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
    const Communicator& ranks, const std::vector<Message>& messages, size_t rounds,
    const std::vector<at::Tensor>& own, c10::Device device,
    const std::function<void(size_t round, const std::vector<at::Tensor>& tensors)>& on_arrival) {
  InFlight next;
  for (size_t round = 0; round < rounds; ++round) {
    const InFlight current = round == 0 ? begin(ranks, messages, 0, own, device) : std::move(next);
    current.wait();
    if (round + 1 < rounds) {
      next = begin(ranks, messages, round + 1, own, device);
    }
    std::vector<at::Tensor> tensors(messages.size());
    for (size_t i = 0; i < messages.size(); ++i) {
      if (messages[i].round == round && messages[i].from == ranks.rank() &&
          messages[i].to == ranks.rank()) {
        tensors[i] = own[i];
      }
    }
    for (const auto& [i, offset] : current.arrivals) {
      tensors[i] = view_in(current.incoming, offset, messages[i].dtype, messages[i].sizes);
    }
    on_arrival(round, tensors);
  }
}

}  // namespace torchium::distributed
