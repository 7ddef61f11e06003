// Numbers that the hosts of all ranks exchange without a device.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace torchium::distributed {

// Through the TCPStore of a process group. An exchange of two ranks of one host takes about 0.1 ms.
// A collective of NCCL would wait for all work of the device, and one of Gloo wakes threads. As
// with collectives, all ranks make the same calls in the same order, from one thread at a time.
class HostExchange {
 public:
  // Each rank reads what all others have written: for more ranks a collective is faster.
  static constexpr int64_t kMostRanks = 16;

  // A connection to the store for these exchanges alone, because other threads block that of the
  // group while they wait. Null: the group has no TCPStore or too many ranks, or the connection
  // fails.
  static c10::intrusive_ptr<c10d::Store> connect(c10d::ProcessGroup& group);

  // `name`: the same on all ranks, and of no other exchange through this store.
  HostExchange(c10::intrusive_ptr<c10d::Store> connection, std::string name, int64_t rank,
               int64_t ranks);
  ~HostExchange();

  // The numbers of each rank, which gives equally many: [rank][position]. All ranks must call it.
  // Throws c10::Error after the timeout of the group, or if another rank has made another call; so
  // does every later call.
  std::vector<std::vector<int64_t>> gather(const std::vector<int64_t>& own);

  // Of an exchange.
  std::chrono::milliseconds timeout() const;

  // The name under which the ranks of this group share memory (c10d::symmetric_memory).
  std::string memory_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group);
  // An attempt has failed on some of them.
  void give_up_memory() { shares_memory_ = false; }
  bool shares_memory() const { return shares_memory_; }

 private:
  std::string key(int64_t number, int64_t rank) const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::string name_;
  int64_t rank_, ranks_;
  int64_t count_ = 0;  // of calls
  bool has_failed_ = false;
  bool shares_memory_ = true, has_memory_group_ = false;
};

}  // namespace torchium::distributed
