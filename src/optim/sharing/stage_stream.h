// A second stream next to the one on which the stages of a step are computed: the directions of a
// stage travel and are applied on it, while the next stage is computed. On a CPU all runs in order.
#pragma once

#include "distributed/held_error.h"

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstddef>
#include <optional>
#include <vector>

namespace torchium::optim::detail {

class StageStream {
 public:
  explicit StageStream(c10::Device device) : device_(device), joined_(device.type()) {
    if (!device.is_cpu()) {
      side_ = implementation().getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    }
  }

  c10::Device device() const { return device_; }

  // A step begins; none of its stages has ended.
  void begin() { ended_ = 0; }
  // The current stream has been given all work of the next stage.
  void end_stage() {
    if (side_) {
      if (ends_.size() == ended_) {
        ends_.emplace_back(device_.type());
      }
      ends_[ended_].record(implementation().getStream(device_));
    }
    ++ended_;
  }
  // The same for all stages before this one, also after an error in one of them.
  void end_stages(size_t stages) {
    while (ended_ < stages) {
      end_stage();
    }
  }
  // Within run(): what follows waits for the work of this stage.
  void wait_for(size_t stage) const {
    if (side_) {
      ends_[stage].block(*side_);
    }
  }

  // Runs `work` with the second stream as the current one. The first one then waits for it, also if
  // `work` throws.
  template <typename Work>
  void run(const Work& work) {
    if (!side_) {
      work();
      return;
    }
    distributed::HeldError held;
    held.run([&] {
      const c10::StreamGuard guard(*side_);
      work();
    });
    joined_.record(*side_);
    joined_.block(implementation().getStream(device_));
    held.raise();
  }

 private:
  c10::impl::VirtualGuardImpl implementation() const {
    return c10::impl::VirtualGuardImpl(device_.type());
  }

  c10::Device device_;
  std::optional<c10::Stream> side_;  // undefined on a CPU
  std::vector<c10::Event> ends_;     // of stages
  size_t ended_ = 0;
  c10::Event joined_;
};

}  // namespace torchium::optim::detail
