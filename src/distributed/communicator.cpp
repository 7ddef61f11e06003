#include "distributed/communicator.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>

namespace torchium::distributed {

struct Communicator::Group {
  c10::intrusive_ptr<c10d::ProcessGroup> processes;

  // Numbers of the host, on a device of the backend: the CPU if it has one for that.
  at::Tensor sent(const std::vector<int64_t>& values) const {
    const at::Tensor tensor = at::tensor(values, at::kLong);
    const std::vector<c10::Device> devices = processes->getDeviceTypes();
    const bool takes_cpu = devices.empty() || std::ranges::any_of(devices, &c10::Device::is_cpu);
    return takes_cpu ? tensor : tensor.to(devices.front().type());
  }
};

Communicator::Communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group)
    : group_(std::make_shared<Group>(Group{group})) {
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

std::vector<int64_t> Communicator::all_reduce_max(const std::vector<int64_t>& values) const {
  at::Tensor all = group_->sent(values);
  all_reduce_max_(all);
  const at::Tensor result = all.cpu();
  const auto* data = result.const_data_ptr<int64_t>();
  return {data, data + result.numel()};
}

void Communicator::all_reduce_max_(at::Tensor& values) const {
  std::vector<at::Tensor> tensors{values};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group_->processes->allreduce(tensors, options)->wait();
}

void Communicator::all_reduce_sum_(at::Tensor& values) const { begin_all_reduce_sum(values)(); }

void Communicator::broadcast_(at::Tensor& values) const {
  std::vector<at::Tensor> tensors{values};
  group_->processes->broadcast(tensors)->wait();
}

std::vector<std::vector<int64_t>> Communicator::all_gather(
    const std::vector<int64_t>& values) const {
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
  std::vector<at::Tensor> tensors{values};
  const auto work = group_->processes->allreduce(tensors);
  return [work] { work->wait(); };
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
