#include "optim/core/group_runtime.h"

namespace torchium::optim::detail {

GroupRuntime& GroupRuntimes::at(size_t group, c10::Device device) {
  const Key key{group, static_cast<int>(device.type()), device.index()};
  return runtimes_.try_emplace(key, group, device).first->second;
}

}  // namespace torchium::optim::detail
