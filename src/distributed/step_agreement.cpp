#include "distributed/step_agreement.h"

#include "support/stream_capture.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

namespace torchium::distributed {
namespace {

using cuda_kernels::MessageSlot;
using enum MessageSlot;
using cuda_kernels::kMost;

// Positive, so that its negative is a number too.
int64_t short_hash(uint64_t hash) { return static_cast<int64_t>(hash >> 2); }

uint64_t hash_of(const std::vector<char>& mask) {
  return Hash().add(std::string(mask.begin(), mask.end())).value();
}

uint64_t hash_of(const std::vector<int64_t>& layers) {
  Hash hash;
  for (const int64_t layer : layers) {
    hash.add(layer);
  }
  return hash.value();
}

// "rank 1", "ranks 1 and 2", "ranks 0, 1 and 2"
std::string listed(const std::vector<int64_t>& ranks) {
  std::ostringstream text;
  text << (ranks.size() > 1 ? "ranks " : "rank ");
  for (size_t i = 0; i < ranks.size(); ++i) {
    text << (i == 0 ? "" : i + 1 < ranks.size() ? ", " : " and ") << ranks[i];
  }
  return text.str();
}

// Names the first parameter whose gradient some ranks lack.
[[noreturn]] void refuse_masks(const StepFindings& own, const Communicator& ranks,
                               const std::vector<std::string>& names) {
  const auto masks = ranks.all_gather({own.mask.begin(), own.mask.end()});
  for (size_t i = 0; i < own.mask.size(); ++i) {
    std::vector<int64_t> with, without;
    for (size_t rank = 0; rank < masks.size(); ++rank) {
      (masks[rank][i] != 0 ? with : without).push_back(static_cast<int64_t>(rank));
    }
    TORCH_CHECK(with.empty() || without.empty(), names[i], " has a gradient on ", listed(with),
                " of the process group and none on ", listed(without),
                "; all ranks need gradients of the same parameters. No rank has taken the step");
  }
  TORCH_INTERNAL_ASSERT(false, "masks differ in their hashes alone");
}

// Names the first parameter whose layer the ranks treat differently.
[[noreturn]] void refuse_layers(const StepFindings& own, const Communicator& ranks,
                                const std::vector<std::string>& names) {
  const auto layers = ranks.all_gather(own.layers);
  for (size_t i = 0; i < own.layers.size(); ++i) {
    std::vector<int64_t> with, without, different;
    for (size_t rank = 0; rank < layers.size(); ++rank) {
      (layers[rank][i] % 2 != 0 ? with : without).push_back(static_cast<int64_t>(rank));
      if (layers[rank][i] != layers[0][i]) {
        different.push_back(static_cast<int64_t>(rank));
      }
    }
    TORCH_CHECK(
        with.empty() || without.empty(), names[i], " has captured samples on ", listed(with),
        " of the process group and none on ", listed(without),
        "; its layer must run in the forward pass of all ranks, and all ranks need the same "
        "checkpoint. No rank has taken the step");
    TORCH_CHECK(different.empty(), names[i],
                " belongs to a different layer, or has different state, on ", listed(different),
                " of the process group than on rank 0; all ranks need the same model and the same "
                "checkpoint. No rank has taken the step");
  }
  TORCH_INTERNAL_ASSERT(false, "layers differ in their hashes alone");
}

// Names as numbers, which all ranks gather. Longer ones are cut.
constexpr size_t kCallNumbers = 4;

std::vector<int64_t> numbers_of(const std::string& call) {
  std::vector<int64_t> numbers(kCallNumbers, 0);
  std::memcpy(numbers.data(), call.data(), std::min(call.size(), kCallNumbers * sizeof(int64_t)));
  return numbers;
}

std::string call_in(const std::vector<int64_t>& numbers) {
  std::string call(kCallNumbers * sizeof(int64_t), '\0');
  std::memcpy(call.data(), numbers.data(), call.size());
  return call.substr(0, call.find('\0'));
}

// Names the first two ranks that have made different calls.
void check_calls(const StepFindings& own, const Communicator& ranks) {
  const auto calls = ranks.all_gather(numbers_of(own.call));
  for (size_t rank = 1; rank < calls.size(); ++rank) {
    TORCH_CHECK(calls[rank] == calls[0], "rank 0 of the process group has called ",
                call_in(calls[0]), " and rank ", rank, " ", call_in(calls[rank]),
                "; all ranks need the same calls in the same order. No rank has taken the step");
  }
}

[[noreturn]] void refuse_setups(const StepFindings& own, const Communicator& ranks) {
  check_calls(own, ranks);
  const auto setups = ranks.all_gather({short_hash(own.setup)});
  std::vector<int64_t> different;
  for (size_t rank = 0; rank < setups.size(); ++rank) {
    if (setups[rank] != setups[0]) {
      different.push_back(static_cast<int64_t>(rank));
    }
  }
  TORCH_CHECK(
      false, listed(different), " of the process group ",
      different.size() > 1 ? "differ" : "differs",
      " from rank 0 in parameters, options or learning rates; "
      "construct the optimizer with the same arguments on all ranks, and change options in the "
      "same step. No rank has taken the step");
}

}  // namespace

Hash& Hash::add(const std::string& text) {
  add_bytes(text.data(), text.size());
  return add(static_cast<int64_t>(text.size()));
}

Hash& Hash::add(int64_t value) {
  add_bytes(&value, sizeof(value));
  return *this;
}

Hash& Hash::add(double value) {
  add_bytes(&value, sizeof(value));
  return *this;
}

void Hash::add_bytes(const void* data, size_t count) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < count; ++i) {
    value_ = (value_ ^ bytes[i]) * 1099511628211ULL;
  }
}

StepFindings findings_of_call(const std::string& call) {
  StepFindings findings;
  findings.call = call;
  findings.setup = Hash().add(call).value();
  return findings;
}

int64_t failure_of_rank(const Communicator& ranks, FailedPart part) {
  return ranks.rank() + 1 + (part == FailedPart::kLastUpdate ? ranks.size() : 0);
}

void check_failure(int64_t failure, const Communicator& ranks) {
  TORCH_CHECK(failure <= ranks.size(), "rank ", failure - ranks.size() - 1,
              " of the process group raised an error while it applied the last update; see its "
              "message. The parameters of the ranks differ now: continue from a checkpoint");
  TORCH_CHECK(failure == 0, "rank ", failure - 1,
              " of the process group raised an error during its work in step(); see its message. "
              "No parameter has changed, but the state of other ranks has: continue from a "
              "checkpoint");
}

namespace {

// Largest values decide: two hashes agree if the largest and the smallest do. An error comes first,
// and is all that a rank may know: it gives no groups.
std::vector<int64_t> message_of(const StepFindings& own, const Communicator& ranks) {
  std::vector<int64_t> values(kGroups, 0);
  const auto add_both = [&](MessageSlot slot, int64_t value) {
    values[slot] = own.has_error ? 0 : value;
    values[slot + 1] = own.has_error ? -kMost : -value;
  };
  values[kError] = own.has_error ? ranks.rank() + 1 : 0;
  values[kFailure] = own.failure;
  values[kFoundInf] = own.found_inf ? 1 : 0;
  values[kRenews] = own.renews ? 1 : 0;
  add_both(kSetup, short_hash(own.setup));
  add_both(kMask, short_hash(hash_of(own.mask)));
  add_both(kLayers, short_hash(hash_of(own.layers)));
  add_both(kGroupCount, static_cast<int64_t>(own.groups.size()));
  add_both(kCounts, short_hash(own.counts));
  add_both(kNewMemory, own.new_memory == OnRanks::kAll ? 1 : 0);
  for (size_t g = 0; g < kMostSharedGroups; ++g) {
    const GroupFindings found = g < own.groups.size() ? own.groups[g] : GroupFindings();
    values.push_back(found.unfit < 0 ? 0 : kMost - found.unfit);
    values.push_back(found.failed < 0 ? 0
                                      : found.root_failures * (kMost + 1) + kMost - found.failed);
  }
  return values;
}

// Of a tensor on the CPU.
std::vector<int64_t> numbers_in(const at::Tensor& message) {
  const auto* data = message.const_data_ptr<int64_t>();
  return {data, data + message.numel()};
}

// most, least: of 1 on ranks and 0 on others, the latter negative.
OnRanks on_ranks(int64_t most, int64_t least) {
  return most != -least ? OnRanks::kSome : most == 1 ? OnRanks::kAll : OnRanks::kNone;
}

// Throws unless all ranks can take or skip the step together.
StepFindings findings_in(const std::vector<int64_t>& values, const StepFindings& own,
                         const Communicator& ranks, const std::vector<std::string>& names) {
  const auto differs = [&](MessageSlot slot) { return values[slot] != -values[slot + 1]; };
  if (values[kError] != 0) {
    TORCH_CHECK(own.has_error, "rank ", values[kError] - 1,
                " of the process group raised an error in ", own.call,
                "; see its message. No rank has taken the step");
    StepFindings all = own;
    all.others_go_on = values[kSetup] != 0;  // which is 0 on ranks with an error
    return all;
  }
  if (differs(kSetup) || differs(kGroupCount)) {
    refuse_setups(own, ranks);
  }
  if (differs(kMask)) {
    refuse_masks(own, ranks, names);
  }
  if (differs(kLayers)) {
    refuse_layers(own, ranks, names);
  }
  StepFindings all = own;
  all.failure = values[kFailure];
  all.found_inf = values[kFoundInf] != 0;
  all.renews = values[kRenews] != 0;
  all.same_counts = !differs(kCounts);
  all.new_memory = on_ranks(values[kNewMemory], values[kNewMemory + 1]);
  for (size_t g = 0; g < own.groups.size(); ++g) {
    const int64_t unfit = values[kGroups + 2 * g], failed = values[kGroups + 2 * g + 1];
    all.groups[g].unfit = unfit == 0 ? -1 : kMost - unfit;
    all.groups[g].root_failures = failed / (kMost + 1);
    all.groups[g].failed = failed == 0 ? -1 : kMost - failed % (kMost + 1);
  }
  return all;
}

}  // namespace

StepFindings agree(const StepFindings& own, const Communicator& ranks,
                   const std::vector<std::string>& names, c10::Device device) {
  HostMessage host;
  PendingAgreement agreement(own, {}, ranks, device, host);
  agreement.begin();
  return agreement.settle(names);
}

void HostMessage::check_and_keep(const std::vector<int64_t>& values, c10::Device device) {
  TORCH_CHECK(values == values_ || !torchium::detail::is_capturing(device),
              "step() cannot be captured yet: parameters, options or their state have changed "
              "since the step before; run more steps before the capture");
  values_ = values;
}

PendingAgreement::PendingAgreement(StepFindings own, const DeviceFindings& on_device,
                                   const Communicator& ranks, c10::Device device, HostMessage& host)
    : own_(std::move(own)), ranks_(ranks), values_(message_of(own_, ranks_)) {
  if (device.is_cpu()) {
    TORCH_INTERNAL_ASSERT(!on_device.found_inf.defined() && !on_device.unfit.defined() &&
                          !on_device.failure.defined());
    return;
  }
  host.check_and_keep(values_, device);
  message_ = packed_message(values_, on_device, own_.groups.size(), device);
}

void PendingAgreement::begin() {
  if (!message_.defined()) {
    values_ = ranks_.all_reduce_max(values_);
    return;
  }
  ranks_.all_reduce_max_(message_);
  held_.run([&] {
    skipped_ = skipped_groups(message_, own_.groups.size());
    if (torchium::detail::is_capturing(message_.device())) {
      return;
    }
    on_host_ = at::empty(message_.sizes(), at::TensorOptions(at::kLong).pinned_memory(true));
    on_host_.copy_(message_, /*non_blocking=*/true);
    const c10::Device device = message_.device();
    arrived_.emplace(device.type());
    arrived_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  });
}

const at::Tensor& PendingAgreement::skipped() const {
  held_.raise();
  return skipped_;
}

StepFindings PendingAgreement::settle(const std::vector<std::string>& names) const {
  if (!message_.defined()) {
    return findings_in(values_, own_, ranks_, names);
  }
  if (!held_.is_set()) {
    arrived_->synchronize();
  }
  return findings_in(numbers_in(held_.is_set() ? message_.cpu() : on_host_), own_, ranks_, names);
}

void PendingAgreement::keep(DeviceAnswer& answer) const {
  if (!answer.message.defined() || answer.message.device() != message_.device()) {
    answer.message = at::empty_like(message_);
    answer.skips = at::zeros({cuda_kernels::kMostMessageGroups}, message_.options());
  }
  answer.own = own_;
  keep_message(message_, answer.message, answer.skips);
}

OnRanks PendingAgreement::new_memory() const {
  held_.raise();
  arrived_->synchronize();
  const auto values = numbers_in(on_host_);
  return on_ranks(values[kNewMemory], values[kNewMemory + 1]);
}

StepFindings settle_later(const DeviceAnswer& answer, const Communicator& ranks,
                          const std::vector<std::string>& names) {
  return findings_in(numbers_in(answer.message.cpu()), answer.own, ranks, names);
}

}  // namespace torchium::distributed
