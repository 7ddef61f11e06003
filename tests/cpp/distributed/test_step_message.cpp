// The message of a step on a device: what the ranks read from it, and the same by kernels.
#include "cuda_kernels/optimizer_step/message_slots.h"
#include "distributed/step_message.h"

#include <torch/torch.h>

#include <gtest/gtest.h>
#include <limits>
#include <vector>

namespace torchium::testing::step_message {
namespace {

using namespace torchium::distributed;
using enum cuda_kernels::MessageSlot;
using cuda_kernels::kMessageSize;
using cuda_kernels::kMost;
using cuda_kernels::kMostMessageGroups;
using Numbers = std::vector<int64_t>;

// With a hash of everything in which ranks may differ.
Numbers host_numbers() {
  Numbers values(kMessageSize, 0);
  for (int slot = kSetup; slot < kGroups; slot += 2) {
    values[slot] = 100 + slot;
    values[slot + 1] = -values[slot];
  }
  return values;
}

at::Tensor int64s(const Numbers& values) { return at::tensor(values, at::kLong); }

std::vector<float> skipped_in(const Numbers& values, size_t groups) {
  const at::Tensor skipped = skipped_groups(int64s(values), groups);
  return {skipped.const_data_ptr<float>(), skipped.const_data_ptr<float>() + skipped.numel()};
}

TEST(StepMessage, HasWhatOnlyTheDeviceKnowsInPlaceOfTheHosts) {
  Numbers expected = host_numbers();
  expected[kRenews] = 1;
  expected[kGroups + 5] = 7;  // failures of roots
  const Numbers host = expected;
  EXPECT_TRUE(at::equal(packed_message(host, {}, 3, at::kCPU), int64s(expected)));

  expected[kFoundInf] = 1;
  expected[kFailure] = 4;
  expected[kGroups + 2] = kMost - 12;
  expected[kGroups + 4] = kMost;
  const at::Tensor unfit = int64s({0, kMost - 12, kMost}).to(at::kInt);
  const DeviceFindings found{at::tensor(4096.0F), unfit, int64s({4})};
  EXPECT_TRUE(at::equal(packed_message(host, found, 3, at::kCPU), int64s(expected)));
}

TEST(StepMessage, SkipsTheGroupsThatTheRanksCannotStep) {
  using Skipped = std::vector<float>;
  EXPECT_EQ(skipped_in(host_numbers(), 2), Skipped({0, 0}));
  Numbers values = host_numbers();
  values[kGroups + 2] = kMost;
  EXPECT_EQ(skipped_in(values, 3), Skipped({0, 1, 0}));
  for (const int slot : {kError, kFailure, kFoundInf}) {
    values = host_numbers();
    values[slot] = 1;
    EXPECT_EQ(skipped_in(values, 2), Skipped({1, 1})) << slot;
  }
  for (int slot = kSetup; slot < kGroups; ++slot) {  // one rank differs
    values = host_numbers();
    ++values[slot];
    const float expected = slot < kCounts ? 1 : 0;
    EXPECT_EQ(skipped_in(values, 2), Skipped({expected, expected})) << slot;
  }
  values = host_numbers();  // of no group alone
  values[kRenews] = values[kGroups + 1] = 1;
  EXPECT_EQ(skipped_in(values, 1), Skipped({0}));
  EXPECT_EQ(skipped_in(values, 0), Skipped());
}

TEST(StepMessage, CountsStepsInARowThatGradientsHaveSkipped) {
  at::Tensor kept = at::zeros({kMessageSize}, at::kLong);
  at::Tensor skips = at::zeros({kMostMessageGroups}, at::kLong);
  const auto keep = [&](bool unfit, bool found_inf) {
    Numbers values = host_numbers();
    values[kGroups + 2] = unfit ? kMost - 3 : 0;
    values[kFoundInf] = found_inf ? 1 : 0;
    const at::Tensor message = int64s(values);
    keep_message(message, kept, skips);
    EXPECT_TRUE(at::equal(kept, message));
    EXPECT_EQ(skips[0].item<int64_t>(), 0);
    return skips[1].item<int64_t>();
  };
  EXPECT_EQ(keep(true, false), 1);
  EXPECT_EQ(keep(true, false), 2);
  EXPECT_EQ(keep(true, true), 2);
  EXPECT_EQ(keep(false, true), 2);
  EXPECT_EQ(keep(false, false), 0);
}

// Each slot at its time, and random ones.
Numbers varied_numbers(int64_t round) {
  Numbers values = host_numbers();
  if (round < kMessageSize) {
    ++values[round];
    return values;
  }
  const at::Tensor changes = at::randint(-1, 2, {kMessageSize}, at::kLong);
  const at::Tensor is_changed = at::rand({kMessageSize}) < 0.05;
  const at::Tensor sum = int64s(values) + changes * is_changed;
  return {sum.const_data_ptr<int64_t>(), sum.const_data_ptr<int64_t>() + kMessageSize};
}

TEST(StepMessage, IsTheSameByKernels) {
  if (!torch::cuda::is_available()) {
    GTEST_SKIP() << "no CUDA device";
  }
  torch::manual_seed(0);
  const c10::Device device(at::kCUDA, 0);
  at::Tensor kept = at::zeros({kMessageSize}, at::kLong), kept_there = kept.to(device);
  at::Tensor skips = at::zeros({kMostMessageGroups}, at::kLong), skips_there = skips.to(device);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (int64_t round = 0; round < kMessageSize + 200; ++round) {
    const size_t groups = round % 3 == 0 ? kMostMessageGroups : round % 5;
    const Numbers host = varied_numbers(round);
    DeviceFindings found, there;
    if (round % 2 == 0) {
      found.unfit = at::randint(0, 3, {static_cast<int64_t>(groups)}, at::kInt) *
                    at::scalar_tensor(kMost / 2, at::kInt);
      there.unfit = found.unfit.to(device);
    }
    if (round % 4 < 2) {
      found.found_inf = at::scalar_tensor(round % 8 == 0 ? nan : round % 8 / 4);
      there.found_inf = found.found_inf.to(device, round % 4 == 0 ? at::kFloat : at::kDouble);
      found.failure = int64s({round % 7 / 6});
      there.failure = found.failure.to(device);
    }
    const at::Tensor message = packed_message(host, found, groups, at::kCPU);
    const at::Tensor message_there = packed_message(host, there, groups, device);
    EXPECT_TRUE(at::equal(message_there.cpu(), message)) << round;
    EXPECT_TRUE(
        at::equal(skipped_groups(message_there, groups).cpu(), skipped_groups(message, groups)))
        << round;
    keep_message(message, kept, skips);
    keep_message(message_there, kept_there, skips_there);
    EXPECT_TRUE(at::equal(kept_there.cpu(), kept)) << round;
    EXPECT_TRUE(at::equal(skips_there.cpu(), skips)) << round;
  }
}

}  // namespace
}  // namespace torchium::testing::step_message
