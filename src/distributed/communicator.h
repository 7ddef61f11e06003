// Collectives of a c10d process group, as a step needs them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace torchium::distributed {

// What travels at a time, unless the caller chooses.
constexpr int64_t kBucketBytes = int64_t{1} << 25;

class Communicator {
 public:
  explicit Communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group);
  // The group that Python registered under this name.
  explicit Communicator(const std::string& name);

  bool has_group_of(const Communicator& other) const;
  int64_t rank() const;
  int64_t size() const;

  // The largest value of all ranks, for each position. Waits for all ranks.
  std::vector<int64_t> maximum(const std::vector<int64_t>& values) const;
  // The largest value of all ranks, on the device of the tensor. The host waits only on a CPU.
  void maximum_(at::Tensor& values) const;
  // The sum over all ranks, bit for bit the same on each. The host waits only on a CPU.
  void sum_(at::Tensor& values) const;
  // The values of rank 0. The host waits only on a CPU.
  void broadcast_(at::Tensor& values) const;
  // The values of each rank, which gives equally many: [rank][position].
  std::vector<std::vector<int64_t>> gather(const std::vector<int64_t>& values) const;
  // Fills the tensors, which are contiguous, with the bytes that one rank has; the others have
  // zeros there.
  void combine_(const std::vector<at::Tensor>& tensors) const;
  // Begins to add up the values of all ranks, in place: contiguous. Returns the wait.
  std::function<void()> begin_sum(const at::Tensor& values) const;
  // Begins to gather `part` of every rank to `all` [rank, *part]. Returns the wait.
  std::function<void()> begin_gather(const at::Tensor& part, at::Tensor all) const;
  // Begins to send the parts of `outgoing`, so many elements to each rank in order, and to receive
  // `incoming` in the same way. Returns the wait.
  std::function<void()> begin_exchange(const at::Tensor& outgoing, const std::vector<int64_t>& sent,
                                       at::Tensor incoming,
                                       const std::vector<int64_t>& received) const;

 private:
  struct Group;  // keeps the headers of c10d out of this one
  std::shared_ptr<const Group> group_;
};

// Null for no group.
std::shared_ptr<const Communicator> communicator_of(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace torchium::distributed
