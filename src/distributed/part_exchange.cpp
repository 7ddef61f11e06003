#include "distributed/part_exchange.h"

#include "distributed/buffer_layout.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>

namespace torchium::distributed {

PartExchange::PartExchange(const Communicator& communicator, const std::vector<Transfer>& transfers,
                           at::ScalarType dtype, at::ScalarType comm_dtype, int64_t bucket_bytes,
                           c10::Device device)
    : communicator_(communicator),
      comm_dtype_(comm_dtype),
      offsets_(transfers.size(), 0),
      outgoing_(transfers.size()) {
  const int64_t most =
      std::max<int64_t>(1, bucket_bytes / static_cast<int64_t>(c10::elementSize(comm_dtype)));
  std::vector<std::vector<size_t>> members;  // of each bucket
  std::vector<int64_t> sent, received;       // in the last bucket
  for (size_t i = 0; i < transfers.size(); ++i) {
    const auto& [from, to, elements] = transfers[i];
    const bool fits = !members.empty() && (sent[from] == 0 || sent[from] + elements <= most) &&
                      (received[to] == 0 || received[to] + elements <= most);
    if (!fits) {
      members.emplace_back();
      sent.assign(communicator.size(), 0);
      received.assign(communicator.size(), 0);
    }
    members.back().push_back(i);
    sent[from] += elements;
    received[to] += elements;
  }
  int64_t total = 0, most_sent = 0, most_received = 0;
  for (const std::vector<size_t>& of_bucket : members) {
    buckets_.emplace_back();
    Bucket& bucket = buckets_.back();
    bucket.begin = total;
    lay_out(bucket, of_bucket, transfers);
    total += bucket.outgoing;
    most_sent = std::max(most_sent, bucket.outgoing);
    most_received = std::max(most_received, bucket.incoming);
  }
  slots_ = BucketSlots(buckets_.size(), most_sent, most_received, dtype, comm_dtype, device);
  for (size_t k = 0; k < buckets_.size(); ++k) {
    const at::Tensor all = slots_.received(k, buckets_[k].incoming);
    for (const auto& [transfer, offset, elements] : buckets_[k].places) {
      buckets_[k].arrivals.push_back({transfer, all.narrow(0, offset, elements)});
    }
  }
  buffer_ = at::zeros({total}, at::TensorOptions(device).dtype(dtype));
  for (size_t i = 0; i < transfers.size(); ++i) {
    if (transfers[i].from == communicator.rank()) {
      outgoing_[i] = buffer_.narrow(0, offsets_[i], transfers[i].elements);
    }
  }
}

// Parts lie in the order of the ranks on the other side, and of the transfers of each.
void PartExchange::lay_out(Bucket& bucket, const std::vector<size_t>& members,
                           const std::vector<Transfer>& transfers) {
  const int64_t own = communicator_.rank();
  for (int64_t rank = 0; rank < communicator_.size(); ++rank) {
    const int64_t sent = bucket.outgoing, received = bucket.incoming;
    for (const size_t i : members) {
      const auto& [from, to, elements] = transfers[i];
      if (from == own && to == rank) {
        offsets_[i] = bucket.begin + bucket.outgoing;
        bucket.outgoing += aligned(elements);
      } else if (from == rank && to == own) {
        bucket.places.push_back({i, bucket.incoming, elements});
        bucket.incoming += aligned(elements);
      }
    }
    bucket.sent.push_back(bucket.outgoing - sent);
    bucket.received.push_back(bucket.incoming - received);
  }
}

void PartExchange::run(const std::function<void(const std::vector<Arrival>&)>& take) const {
  const auto begin = [&](size_t k) {
    const Bucket& bucket = buckets_[k];
    const at::Tensor values = buffer_.narrow(0, bucket.begin, bucket.outgoing);
    return communicator_.begin_all_to_all(slots_.packed(k, values), bucket.sent,
                                          slots_.received(k, bucket.incoming), bucket.received);
  };
  run_buckets(buckets_.size(), begin, [&](size_t k) { take(buckets_[k].arrivals); });
}

}  // namespace torchium::distributed
