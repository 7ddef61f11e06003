#include "distributed/host_exchange.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cstring>
#include <utility>

namespace torchium::distributed {
namespace {

c10::intrusive_ptr<c10d::Store> innermost(c10::intrusive_ptr<c10d::Store> store) {
  while (const auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    store = const_cast<c10d::PrefixStore*>(prefixed)->getUnderlyingStore();
  }
  return store;
}

std::vector<uint8_t> as_bytes(const std::vector<int64_t>& numbers) {
  std::vector<uint8_t> bytes(numbers.size() * sizeof(int64_t));
  std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

std::vector<int64_t> as_numbers(const std::vector<uint8_t>& bytes) {
  std::vector<int64_t> numbers(bytes.size() / sizeof(int64_t));
  std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(int64_t));
  return numbers;
}

}  // namespace

bool HostExchange::is_possible(const c10d::ProcessGroup& group) {
  const c10::intrusive_ptr<c10d::Store> store = group.getStore();
  return store != nullptr && group.getSize() <= kMostRanks &&
         dynamic_cast<const c10d::TCPStore*>(innermost(store).get()) != nullptr;
}

// Other threads use the connection of the group, and block it while they wait.
HostExchange::HostExchange(const c10d::ProcessGroup& group, std::string name)
    : store_(group.getStore()->clone()),
      name_(std::move(name)),
      rank_(group.getRank()),
      ranks_(group.getSize()) {
  store_->setTimeout(group.getStore()->getTimeout());
}

HostExchange::~HostExchange() = default;

std::string HostExchange::key(int64_t number, int64_t rank) const {
  return name_ + '/' + std::to_string(number) + '/' + std::to_string(rank);
}

std::vector<std::vector<int64_t>> HostExchange::gather(const std::vector<int64_t>& own) {
  const int64_t number = count_++;
  store_->set(key(number, rank_), as_bytes(own));
  if (number >= 2) {  // all ranks have left that call, because this one has left the next
    store_->deleteKey(key(number - 2, rank_));
  }
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    keys.push_back(key(number, rank));
  }
  std::vector<std::vector<int64_t>> all;
  for (const std::vector<uint8_t>& bytes : store_->multiGet(keys)) {
    all.push_back(as_numbers(bytes));
  }
  TORCH_INTERNAL_ASSERT(static_cast<int64_t>(all.size()) == ranks_);
  return all;
}

}  // namespace torchium::distributed
