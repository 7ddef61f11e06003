// What an optimizer keeps for one group on one device besides its state; rebuilt when absent.
#pragma once

#include "optim/core/step_monitor.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <tuple>

namespace torchium::optim::detail {

class GroupRuntime {
 public:
  GroupRuntime(size_t group, c10::Device device)
      : group_(group), device_(device), monitor_(device) {}

  size_t group() const { return group_; }
  c10::Device device() const { return device_; }
  StepMonitor& monitor() { return monitor_; }

 private:
  size_t group_;
  c10::Device device_;
  StepMonitor monitor_;
};

class GroupRuntimes {
 public:
  GroupRuntime& at(size_t group, c10::Device device);
  // Calls visit(runtime) for each, in the order of the groups.
  template <typename Visitor>
  void for_each(Visitor&& visit) {
    for (auto& entry : runtimes_) {
      visit(entry.second);
    }
  }
  void clear() { runtimes_.clear(); }

 private:
  using Key = std::tuple<size_t, int, int>;  // group, device type, device index
  std::map<Key, GroupRuntime> runtimes_;
};

}  // namespace torchium::optim::detail
