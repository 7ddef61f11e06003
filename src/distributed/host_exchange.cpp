#include "distributed/host_exchange.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <chrono>
#include <cstring>
#include <utility>

namespace torchium::distributed {
namespace {

// Ranks that have shared other memory with different others count their exchanges differently, and
// then wait for each other in vain.
constexpr std::chrono::seconds kMemoryTimeout{30};

bool is_tcp(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  const auto innermost = prefixed == nullptr ? store : prefixed->getUnderlyingNonPrefixStore();
  return dynamic_cast<c10d::TCPStore*>(innermost.get()) != nullptr;
}

// That of its collectives; of the store, if the backend does not say it.
std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group) {
  try {
    const auto backend = group.getBackend(group.getDeviceTypes().at(0).type());
    return backend->getBackendOptions()->timeout;
  } catch (const std::exception&) {
    return group.getStore()->getTimeout();
  }
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

c10::intrusive_ptr<c10d::Store> HostExchange::connect(c10d::ProcessGroup& group) {
  const c10::intrusive_ptr<c10d::Store> store = group.getStore();
  if (store == nullptr || group.getSize() > kMostRanks || !is_tcp(store)) {
    return nullptr;
  }
  try {
    auto connection = store->clone();
    connection->setTimeout(timeout_of(group));
    return connection;
  } catch (const c10::Error&) {
    return nullptr;
  }
}

HostExchange::HostExchange(c10::intrusive_ptr<c10d::Store> connection, std::string name,
                           int64_t rank, int64_t ranks)
    : store_(std::move(connection)), name_(std::move(name)), rank_(rank), ranks_(ranks) {}

HostExchange::~HostExchange() = default;

std::string HostExchange::key(int64_t number, int64_t rank) const {
  return name_ + '/' + std::to_string(number) + '/' + std::to_string(rank);
}

std::vector<std::vector<int64_t>> HostExchange::gather(const std::vector<int64_t>& own) {
  TORCH_CHECK(!has_failed_,
              "an exchange between the ranks of the process group has failed before; continue from "
              "a checkpoint in new processes");
  has_failed_ = true;  // unless the end is reached
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
    TORCH_CHECK(all.back().size() == own.size(), "rank ", all.size() - 1,
                " of the process group is in another call of an optimizer than rank ", rank_,
                "; all ranks must make the same calls in the same order");
  }
  has_failed_ = false;
  return all;
}

std::chrono::milliseconds HostExchange::timeout() const { return store_->getTimeout(); }

std::string HostExchange::memory_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (!has_memory_group_) {
    auto connection = store_->clone();
    connection->setTimeout(kMemoryTimeout);
    c10d::symmetric_memory::set_group_info(
        name_, static_cast<int>(rank_), static_cast<int>(ranks_),
        c10::make_intrusive<c10d::PrefixStore>(name_ + "/memory", std::move(connection)));
    c10d::register_process_group(name_, group);
    has_memory_group_ = true;
  }
  return name_;
}

}  // namespace torchium::distributed
