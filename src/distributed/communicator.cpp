#include "distributed/communicator.h"

#include "distributed/host_exchange.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/debug.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <utility>

namespace torchium::distributed {

namespace {

// How numbers travel between the hosts of a group. Null: by collectives. None: not yet known.
using Hosts = std::optional<std::unique_ptr<HostExchange>>;

// All communicators of a process group share one, which lasts at least as long as the group: ranks
// may create and destroy optimizers at different times.
std::shared_ptr<Hosts> hosts_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  struct Known {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    std::shared_ptr<Hosts> hosts;
  };
  static auto& known = *new std::map<const c10d::ProcessGroup*, Known>;  // outlives the threads
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto& entry) { return entry.second.group.expired(); });
  const auto [found, is_new] = known.try_emplace(
      group.get(), Known{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), nullptr});
  if (is_new) {
    found->second.hosts = std::make_shared<Hosts>();
  }
  return found->second.hosts;
}

}  // namespace

struct Communicator::Group {
  c10::intrusive_ptr<c10d::ProcessGroup> processes;
  std::shared_ptr<Hosts> hosts;

  // Numbers of the host, on a device of the backend: the CPU if it has one for that.
  at::Tensor sent(const std::vector<int64_t>& values) const {
    const at::Tensor tensor = at::tensor(values, at::kLong);
    const std::vector<c10::Device> devices = processes->getDeviceTypes();
    const bool takes_cpu = devices.empty() || std::ranges::any_of(devices, &c10::Device::is_cpu);
    return takes_cpu ? tensor : tensor.to(devices.front().type());
  }

  std::function<void()> begin_all_reduce(const at::Tensor& values, c10d::ReduceOp op) const {
    std::vector<at::Tensor> tensors{values};
    c10d::AllreduceOptions options;
    options.reduceOp = std::move(op);
    const auto work = processes->allreduce(tensors, options);
    return [work] { work->wait(); };
  }

  std::vector<int64_t> all_reduce_max(const std::vector<int64_t>& values) const {
    const at::Tensor all = sent(values);
    begin_all_reduce(all, c10d::ReduceOp::MAX)();
    const at::Tensor result = all.cpu();
    const auto* data = result.const_data_ptr<int64_t>();
    return {data, data + result.numel()};
  }

  // Collectives of Gloo alone wait for no device, and fail at once when another rank dies.
  bool has_other_backend_than_gloo() const {
    return std::ranges::any_of(processes->getDeviceTypes(), [&](const c10::Device& device) {
      return processes->getBackend(device.type())->getBackendName() != "gloo";
    });
  }

  // Null: collectives are better, or not all ranks can use it. The name is random, of rank 0: the
  // store may hold what an earlier group has left, and other groups may have the same prefix.
  HostExchange* host_exchange() const {
    if (!hosts->has_value()) {
      std::random_device random;
      const int64_t name = processes->getRank() == 0 ? random() : 0;
      auto connection = has_other_backend_than_gloo() ? HostExchange::connect(*processes) : nullptr;
      const auto all = all_reduce_max({connection == nullptr ? 1 : 0, name});
      hosts->emplace();
      if (all[0] == 0) {
        **hosts = std::make_unique<HostExchange>(std::move(connection),
                                                 "torchium/" + std::to_string(all[1]),
                                                 processes->getRank(), processes->getSize());
      }
    }
    return hosts->value().get();
  }
};

Communicator::Communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group)
    : group_(group == nullptr ? nullptr : std::make_shared<Group>(Group{group, hosts_of(group)})) {
  TORCH_CHECK_VALUE(group != nullptr, "process_group must be a process group, got null");
}

namespace {

c10::intrusive_ptr<c10d::ProcessGroup> group_of_name(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    TORCH_CHECK_VALUE(false, "process_group '", name,
                      "' of this copy of an optimizer does not exist in this process; create it "
                      "before, or construct the optimizer and call load_state_dict()");
  }
}

}  // namespace

Communicator::Communicator(const std::string& name) : Communicator(group_of_name(name)) {}

bool Communicator::is_same_group_as(const Communicator& other) const {
  return group_->processes == other.group_->processes;
}

int64_t Communicator::rank() const { return group_->processes->getRank(); }
int64_t Communicator::size() const { return group_->processes->getSize(); }

bool Communicator::is_capturable() const {
  const auto devices = group_->processes->getDeviceTypes();
  return std::ranges::any_of(devices, &c10::Device::is_cuda) &&
         group_->processes->getBackend(c10::DeviceType::CUDA)->getBackendName() == "nccl" &&
         c10d::debug_level() != c10d::DebugLevel::Detail;  // which adds exchanges of hosts
}

std::vector<int64_t> Communicator::all_reduce_max(const std::vector<int64_t>& values) const {
  HostExchange* hosts = group_->host_exchange();
  if (hosts == nullptr) {
    return group_->all_reduce_max(values);
  }
  std::vector<int64_t> most = values;
  for (const std::vector<int64_t>& of_rank : hosts->gather(values)) {
    std::ranges::transform(of_rank, most, most.begin(),
                           [](int64_t a, int64_t b) { return std::max(a, b); });
  }
  return most;
}

void Communicator::all_reduce_max_(at::Tensor& values) const {
  group_->begin_all_reduce(values, c10d::ReduceOp::MAX)();
}

void Communicator::all_reduce_sum_(at::Tensor& values) const { begin_all_reduce_sum(values)(); }

void Communicator::broadcast_(at::Tensor& values) const {
  std::vector<at::Tensor> tensors{values};
  group_->processes->broadcast(tensors)->wait();
}

std::vector<std::vector<int64_t>> Communicator::all_gather(
    const std::vector<int64_t>& values) const {
  if (HostExchange* hosts = group_->host_exchange()) {
    return hosts->gather(values);
  }
  const at::Tensor own = group_->sent(values);
  const at::Tensor all = at::empty({size(), own.numel()}, own.options());
  begin_all_gather(own, all)();
  const at::Tensor result = all.cpu();
  std::vector<std::vector<int64_t>> rows;
  for (int64_t rank = 0; rank < size(); ++rank) {
    const auto* row = result.const_data_ptr<int64_t>() + rank * own.numel();
    rows.emplace_back(row, row + own.numel());
  }
  return rows;
}

bool Communicator::may_share_memory() const {
  HostExchange* hosts = group_->host_exchange();
  return hosts != nullptr && hosts->shares_memory();
}

std::string Communicator::memory_group() const {
  return group_->host_exchange()->memory_group(group_->processes);
}

std::chrono::milliseconds Communicator::timeout() const {
  return group_->host_exchange()->timeout();
}

void Communicator::give_up_memory() const { group_->host_exchange()->give_up_memory(); }

void Communicator::combine_(const std::vector<at::Tensor>& tensors) const {
  std::vector<at::Tensor> bytes;  // a sum of floats would lose -0
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) {
      bytes.push_back(tensor.view({-1}).view(at::kByte));
    }
  }
  if (bytes.empty()) {
    return;
  }
  std::vector<at::Tensor> all{at::cat(bytes)};
  group_->processes->allreduce(all)->wait();
  int64_t at = 0;
  for (at::Tensor& part : bytes) {
    part.copy_(all[0].narrow(0, at, part.numel()));
    at += part.numel();
  }
}

std::function<void()> Communicator::begin_all_reduce_sum(const at::Tensor& values) const {
  return group_->begin_all_reduce(values, c10d::ReduceOp::SUM);
}

std::function<void()> Communicator::begin_all_gather(const at::Tensor& part, at::Tensor all) const {
  at::Tensor input = part, output = all.view({-1});
  const auto work = group_->processes->_allgather_base(output, input);
  return [work] { work->wait(); };
}

std::function<void()> Communicator::begin_all_to_all(const at::Tensor& outgoing,
                                                     const std::vector<int64_t>& sent,
                                                     at::Tensor incoming,
                                                     const std::vector<int64_t>& received) const {
  at::Tensor input = outgoing;
  std::vector<int64_t> output_sizes = received, input_sizes = sent;
  const auto work = group_->processes->alltoall_base(incoming, input, output_sizes, input_sizes);
  return [work] { work->wait(); };
}

std::shared_ptr<const Communicator> communicator_of(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return group == nullptr ? nullptr : std::make_shared<const Communicator>(group);
}

}  // namespace torchium::distributed
