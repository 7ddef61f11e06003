// The order of work on StageStream's streams, on a device whose streams keep what their work waits
// for.
#include "optim/sharing/stage_stream.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/torch.h>

#include <gtest/gtest.h>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

namespace torchium::testing {
namespace {

using Work = std::set<std::string>;

struct Streams {
  c10::StreamId current = 0, next = 100;
  std::map<c10::StreamId, Work> given;  // what the next work of each stream waits for
  bool are_lost = false;
};
Streams& streams() {
  static Streams streams;
  return streams;
}

// FPGA stands for a device that no build of torch has.
constexpr c10::DeviceType kType = c10::DeviceType::FPGA;
const c10::Device kDevice(kType, 0);

c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

struct OrderedStreams final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  explicit OrderedStreams(c10::DeviceType) {}
  OrderedStreams() = default;
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream_of(streams().current); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream_of(++streams().next);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(streams().current, stream.id()));
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    TORCH_CHECK(!streams().are_lost, "the device is lost");
    if (*event == nullptr) {
      *event = new Work;
    }
    *static_cast<Work*>(*event) = streams().given[stream.id()];
  }
  void block(void* event, const c10::Stream& stream) const override {
    streams().given[stream.id()].merge(Work(*static_cast<Work*>(event)));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Work*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(FPGA, OrderedStreams)

// Gives work to the current stream. Returns what it waits for.
Work launch(const std::string& name) {
  Work& given = streams().given[streams().current];
  const Work before = given;
  given.insert(name);
  return before;
}

TEST(StageStream, AppliesAStageWhileTheNextIsComputed) {
  streams() = {};
  optim::detail::StageStream stages(kDevice);
  for (const c10::StreamId current : {0, 0, 7}) {  // also with another current stream
    streams().given.clear();
    streams().current = current;
    stages.begin();
    launch("computation 0");
    stages.end_stage();
    launch("computation 1");
    stages.end_stages(3);
    Work first, second;
    stages.run([&] {
      EXPECT_NE(streams().current, current);
      stages.wait_for(0);
      first = launch("update 0");
      stages.wait_for(1);
      second = launch("update 1");
    });
    EXPECT_EQ(first, Work({"computation 0"}));
    EXPECT_EQ(second, Work({"computation 0", "update 0", "computation 1"}));
    EXPECT_EQ(streams().current, current);
    EXPECT_EQ(launch("next"), Work({"computation 0", "computation 1", "update 0", "update 1"}));
  }
}

TEST(StageStream, ComesBackAfterAnError) {
  streams() = {};
  optim::detail::StageStream stages(kDevice);
  const auto fail = [&] {
    launch("update");
    throw std::runtime_error("an update fails");
  };
  EXPECT_THROW(stages.run(fail), std::runtime_error);
  EXPECT_EQ(streams().current, 0);
  EXPECT_EQ(launch("next"), Work({"update"}));
}

TEST(StageStream, RaisesTheErrorsOfItsDevice) {
  streams() = {};
  optim::detail::StageStream stages(kDevice);
  EXPECT_THROW(stages.run([] { streams().are_lost = true; }), c10::Error);
  EXPECT_EQ(streams().current, 0);
}

TEST(StageStream, OnACpuAllRunsInOrder) {
  optim::detail::StageStream stages(at::kCPU);
  stages.begin();
  stages.end_stages(2);
  bool has_run = false;
  stages.run([&] {
    stages.wait_for(1);
    has_run = true;
  });
  EXPECT_TRUE(has_run);
}

}  // namespace
}  // namespace torchium::testing
