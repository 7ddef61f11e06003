#include "distributed/peer_memory.h"

#include "distributed/communicator.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#ifdef TORCHIUM_WITH_CUDA
#include <ATen/cuda/PeerToPeerAccess.h>
#include <c10/cuda/CUDAFunctions.h>
#endif

#include <algorithm>
#include <fstream>
#include <functional>
#include <sys/stat.h>
#include <utility>

namespace torchium::distributed {
namespace {

namespace symmetric_memory = c10d::symmetric_memory;

constexpr int kChannel = 0;

// The same for processes that see each other and the same files, which exchange of handles needs.
// 0: not known.
int64_t host_number() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  for (const char* names : {"/proc/self/ns/pid", "/proc/self/ns/mnt"}) {
    struct stat status {};
    if (boot.empty() || stat(names, &status) != 0) {
      return 0;
    }
    boot += '/' + std::to_string(status.st_ino);
  }
  return static_cast<int64_t>(std::hash<std::string>()(boot));
}

// places: host and device of each rank. One device of each, all on one host, and that of `rank`
// reads all others. Where devices have other numbers in other processes, this may be false although
// they could be read.
bool reads_all(const std::vector<std::vector<int64_t>>& places, int64_t rank) {
#ifdef TORCHIUM_WITH_CUDA
  const auto& own = places[rank];
  const auto device = [](const auto& place) { return static_cast<c10::DeviceIndex>(place[1]); };
  return own[0] != 0 && std::ranges::all_of(places, [&](const auto& place) {
           return place[0] == own[0] && place[1] < c10::cuda::device_count() &&
                  std::ranges::count(places, place) == 1 &&
                  (place == own || at::cuda::get_p2p_access(device(own), device(place)));
         });
#else
  static_cast<void>(places);
  static_cast<void>(rank);
  return false;
#endif
}

}  // namespace

std::unique_ptr<PeerMemory> PeerMemory::allocate(int64_t bytes, c10::Device device) {
  if (bytes == 0 || !device.is_cuda() || !symmetric_memory::has_allocator(device.type()) ||
      symmetric_memory::get_backend(device) != "CUDA") {  // others allocate collectively
    return nullptr;
  }
  try {
    return std::unique_ptr<PeerMemory>(new PeerMemory(symmetric_memory::empty_strided_p2p(
        {bytes}, {1}, at::kByte, device, std::nullopt, std::nullopt)));
  } catch (const c10::Error&) {  // no memory, or no driver for it
    return nullptr;
  }
}

bool PeerMemory::share(PeerMemory* own, const Communicator& ranks, c10::Device device) {
  if (!ranks.may_share_memory()) {
    return false;
  }
  const c10::DeviceGuard guard(device);
  const auto places = ranks.all_gather({host_number(), device.index()});
  // Between exchanges nothing throws: the other ranks would wait.
  std::string failure, group;
  const auto attempt = [&](const auto& work) {
    try {
      return work();
    } catch (const c10::Error& error) {
      failure = error.what_without_backtrace();
      return false;
    }
  };
  const auto succeed_all = [&](bool succeeds) {
    return ranks.all_reduce_max({succeeds ? 0 : 1})[0] == 0;
  };
  const bool is_ready = own != nullptr && attempt([&] {
                          group = ranks.memory_group();
                          return reads_all(places, ranks.rank());
                        });
  if (!succeed_all(is_ready)) {
    return false;
  }
  const bool has_others = attempt([&] {
    own->find_others(ranks, group);
    return true;
  });
  if (!succeed_all(has_others)) {
    ranks.give_up_memory();
    TORCH_WARN(
        "the ranks of the process group cannot read each other's memory, so that updates travel by "
        "collectives",
        failure.empty() ? "" : ": ", failure);
    return false;
  }
  return true;
}

void PeerMemory::find_others(const Communicator& ranks, const std::string& group) {
  handle_ = symmetric_memory::rendezvous(own_, group);
  timeout_ms_ = ranks.timeout().count();
  for (int rank = 0; rank < ranks.size(); ++rank) {
    of_rank_.push_back(handle_->get_buffer(rank, own_.sizes(), at::kByte, /*storage_offset=*/0));
  }
}

PeerMemory::PeerMemory(at::Tensor own)
    : own_(std::move(own)),
      stream_(c10::impl::VirtualGuardImpl(own_.device().type())
                  .getStreamFromGlobalPool(own_.device(), /*isHighPriority=*/true)) {}

PeerMemory::~PeerMemory() = default;

void PeerMemory::barrier() const { handle_->barrier(kChannel, timeout_ms_); }

std::function<void()> PeerMemory::begin_reads(const std::vector<Read>& reads) const {
  const c10::impl::VirtualGuardImpl streams(stream_.device_type());
  c10::Event begin(stream_.device_type());
  begin.record(streams.getStream(stream_.device()));
  begin.block(stream_);
  {
    const c10::StreamGuard guard(stream_);
    for (const Read& read : reads) {
      read.target.view(at::kByte).copy_(
          of_rank_[read.rank].narrow(0, read.offset, static_cast<int64_t>(read.target.nbytes())));
    }
  }
  auto end = std::make_shared<c10::Event>(stream_.device_type());
  end->record(stream_);
  return [end, streams, device = stream_.device()] { end->block(streams.getStream(device)); };
}

}  // namespace torchium::distributed
