// What all ranks agree on before a step: whether it is taken, and why not. One small all-reduce.
#pragma once

#include "cuda_kernels/optimizer_step/message_slots.h"
#include "distributed/communicator.h"
#include "distributed/held_error.h"
#include "distributed/step_message.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torchium::distributed {

// The groups of an optimizer, so that what ranks exchange has the same length on all of them.
constexpr size_t kMostSharedGroups = cuda_kernels::kMostMessageGroups;

// Of one parameter group. Positions are those of its parameters; -1: none.
struct GroupFindings {
  int64_t unfit = -1;         // first parameter whose gradient is not finite or too large
  int64_t root_failures = 0;  // most consecutive failures of one root
  int64_t failed = -1;        // its parameter
};

enum class OnRanks : uint8_t { kNone, kSome, kAll };

struct StepFindings {
  std::string call = "step()";  // in messages
  bool has_error = false;
  bool others_go_on = false;  // agreed on, on a rank with an error: some ranks have none
  bool found_inf = false;     // a GradScaler has found infinities, or only its device knows
  uint64_t setup = 0;         // a hash of parameters, owners, options and learning rates
  std::vector<char> mask;     // of all parameters: 1 if it has a gradient
  // Of all parameters, for optimizers that record layer calls: a hash of how the next step treats
  // the layer that it is the weight of, odd if it has captured samples of it; or of its state,
  // even.
  std::vector<int64_t> layers;
  bool renews = false;      // this rank has lost inverses, which all ranks then recompute
  uint64_t counts = 0;      // a hash of the numbers of samples of all layers
  bool same_counts = true;  // on all ranks; agreed on
  // Whether the memory that others are to read is new on this rank; agreed on: on which.
  OnRanks new_memory = OnRanks::kNone;
  int64_t failure = 0;  // see failure_of_rank(); of the step before
  std::vector<GroupFindings> groups;
};

// The number of a rank that raised an error in a step after the ranks had agreed on it, while it
// worked or while it applied the last updates. 0: none.
enum class FailedPart : uint8_t { kWork, kLastUpdate };
int64_t failure_of_rank(const Communicator& ranks, FailedPart part);
// Throws the error of all ranks for such a number, unless it is 0.
void check_failure(int64_t failure, const Communicator& ranks);

// For a call other than step() that all ranks make together, such as "update_damping()".
StepFindings findings_of_call(const std::string& call);

// The findings of all ranks together: the first unfit parameter of a group, and its most failures.
// All ranks must call this, and get the same. If a rank has an error, throws c10::Error on all
// others; the call returns on that rank, which then throws its own error. Also throws where setups,
// masks or layers differ. `names`: of all parameters.
// `device`: where the ranks agree; the host waits on all of them.
StepFindings agree(const StepFindings& own, const Communicator& ranks,
                   const std::vector<std::string>& names, c10::Device device = at::kCPU);

// Of steps that the host does not follow, such as those in a CUDA graph.
struct DeviceAnswer {
  StepFindings own;    // of the last step that was launched
  at::Tensor message;  // of the last step; undefined: none
  at::Tensor skips;    // [kMostSharedGroups] int64: steps in a row that gradients have skipped
};
// The findings in the last step. Waits for the device. Throws what agree() does. All ranks must
// call it.
StepFindings settle_later(const DeviceAnswer& answer, const Communicator& ranks,
                          const std::vector<std::string>& names);

// The host's part of the messages of an optimizer. A CUDA graph repeats that which it was captured
// with: only one that the step before has sent too.
class HostMessage {
 public:
  void check_and_keep(const std::vector<int64_t>& values, c10::Device device);

 private:
  std::vector<int64_t> values_;
};

// The same on a device, without a wait: all ranks launch work that has no effect if the step is
// skipped, and settle before they begin what needs all of them, or keep the answer for later. On a
// CPU begin() waits.
class PendingAgreement {
 public:
  // Prepares the message. `on_device` must be empty on a CPU.
  PendingAgreement(StepFindings own, const DeviceFindings& on_device, const Communicator& ranks,
                   c10::Device device, HostMessage& host);

  // All ranks must call it. An error on this rank alone is held, for skipped().
  void begin();
  // skipped_groups(); undefined on a CPU.
  const at::Tensor& skipped() const;
  // Waits for the device. Returns and throws what agree() does. All ranks must call it.
  StepFindings settle(const std::vector<std::string>& names) const;
  // On which ranks memory is new. Waits for the device.
  OnRanks new_memory() const;
  // Keeps the answer on the device, for settle_later().
  void keep(DeviceAnswer& answer) const;

 private:
  StepFindings own_;
  Communicator ranks_;
  std::vector<int64_t> values_;  // of a CPU
  at::Tensor message_;           // of a device
  at::Tensor skipped_, on_host_;
  std::optional<c10::Event> arrived_;
  HeldError held_;
};

// A hash that is the same in every process.
class Hash {
 public:
  Hash& add(const std::string& text);
  Hash& add(int64_t value);
  Hash& add(double value);
  uint64_t value() const { return value_; }

 private:
  void add_bytes(const void* data, size_t count);
  uint64_t value_ = 14695981039346656037ULL;  // FNV-1a
};

}  // namespace torchium::distributed
