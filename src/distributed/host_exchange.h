// Numbers that the hosts of all ranks exchange without a device.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace torchium::distributed {

// Through the TCPStore of a process group, over a connection of its own. An exchange of two ranks
// of one host takes about 0.1 ms. A collective of NCCL would wait for all work of the device, and
// one of Gloo wakes threads.
class HostExchange {
 public:
  // Each rank reads what all others have written: for more ranks a collective is faster.
  static constexpr int64_t kMostRanks = 16;

  // Whether the group has a store for it.
  static bool is_possible(const c10d::ProcessGroup& group);

  // `name`: the same on all ranks, and of no other exchange through this store.
  HostExchange(const c10d::ProcessGroup& group, std::string name);
  ~HostExchange();

  // The numbers of each rank: [rank][position]. All ranks must call it. Throws c10::Error after the
  // timeout of the store.
  std::vector<std::vector<int64_t>> gather(const std::vector<int64_t>& own);

 private:
  std::string key(int64_t number, int64_t rank) const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::string name_;
  int64_t rank_, ranks_;
  int64_t count_ = 0;  // of calls
};

}  // namespace torchium::distributed
