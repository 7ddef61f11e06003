// Collectives of a c10d process group, as a step needs them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace torchium::distributed {

// Default size of a bucket.
constexpr int64_t kBucketBytes = int64_t{1} << 25;

class Communicator {
 public:
  explicit Communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group);
  // The group that Python registered under this name.
  explicit Communicator(const std::string& name);

  bool is_same_group_as(const Communicator& other) const;
  int64_t rank() const;
  int64_t size() const;
  // Whether a CUDA graph may capture collectives of CUDA tensors: NCCL's, in which no host takes
  // part. Other ranks need not capture theirs.
  bool is_capturable() const;

  // The largest value of all ranks, for each position. The host waits for all ranks, and for the
  // device only where the numbers do not travel between the hosts (host_exchange.h).
  std::vector<int64_t> all_reduce_max(const std::vector<int64_t>& values) const;
  // The largest value of all ranks, on the device of the tensor. The host waits only on a CPU.
  void all_reduce_max_(at::Tensor& values) const;
  // The sum over all ranks, bit for bit the same on each. The host waits only on a CPU.
  void all_reduce_sum_(at::Tensor& values) const;
  // The values of rank 0. The host waits only on a CPU.
  void broadcast_(at::Tensor& values) const;
  // The values of each rank, which gives equally many: [rank][position]. Waits as
  // all_reduce_max() does.
  std::vector<std::vector<int64_t>> all_gather(const std::vector<int64_t>& values) const;
  // Whether these ranks may share memory (peer_memory.h): their hosts exchange numbers without a
  // device, and no attempt has failed. The same on all ranks, which must all call it.
  bool may_share_memory() const;
  // Those below need may_share_memory(). The name under which these ranks share memory:
  std::string memory_group() const;
  void give_up_memory() const;
  // Of exchanges between the hosts.
  std::chrono::milliseconds timeout() const;
  // Each of these contiguous tensors has its values on one rank and zeros on the others; afterwards
  // all ranks have the values, bit for bit.
  void combine_(const std::vector<at::Tensor>& tensors) const;
  // Starts an all-reduce in place of a contiguous tensor. The returned function waits for it.
  std::function<void()> begin_all_reduce_sum(const at::Tensor& values) const;
  // Starts to gather `part` of every rank into `all` [rank, *part]. The returned function waits.
  std::function<void()> begin_all_gather(const at::Tensor& part, at::Tensor all) const;
  // Starts to send `sent` elements of `outgoing` to each rank in order, and to receive `received`
  // elements from each into `incoming`. The returned function waits.
  std::function<void()> begin_all_to_all(const at::Tensor& outgoing,
                                         const std::vector<int64_t>& sent, at::Tensor incoming,
                                         const std::vector<int64_t>& received) const;

 private:
  struct Group;  // keeps the headers of c10d out of this one
  std::shared_ptr<const Group> group_;
};

// Null for no group.
std::shared_ptr<const Communicator> communicator_of(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace torchium::distributed
