#include "support/arena.h"

#include "support/stream_capture.h"
#include "support/workspace_owners.h"
#include <torchium/memory.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

namespace torchium {
namespace {

constexpr int64_t kBlockBytes = int64_t{2} << 20;
// Of every tensor, as of CUDA's own allocations.
constexpr int64_t kTensorAlignment = 256;

// Memory that tensors take from the beginning to the end.
struct ArenaBlock {
  at::Tensor memory;                             // bytes
  int64_t taken = 0;                             // by tensors since the block was last empty
  std::atomic<int64_t> tensors = 0, in_use = 0;  // that are alive, and their bytes

  int64_t size() const { return memory.numel(); }
};
using BlockPointer = std::shared_ptr<ArenaBlock>;

// A stream's work is in order, so memory may be taken again while the last work on it is queued.
using ArenaKey = std::pair<c10::Device, c10::StreamId>;
struct ArenaOrder {
  bool operator()(const ArenaKey& a, const ArenaKey& b) const {
    const auto number = [](const ArenaKey& key) {
      return std::tuple(key.first.type(), key.first.index(), key.second);
    };
    return number(a) < number(b);
  }
};

class Arenas {
 public:
  // A block of at least `bytes`; null: beyond the limit.
  BlockPointer take(const ArenaKey& key, int64_t bytes, void*& data) {
    const std::scoped_lock lock(mutex_);
    auto& blocks = blocks_[key];
    for (const BlockPointer& block : blocks) {
      if (block->tensors == 0) block->taken = 0;
    }
    const auto fits = [bytes](const BlockPointer& b) { return b->size() - b->taken >= bytes; };
    auto found = std::ranges::find_if(blocks, fits);
    if (found == blocks.end()) {
      const int64_t size = std::max(bytes, kBlockBytes);
      const int64_t limit = workspace_limit().value_or(std::numeric_limits<int64_t>::max());
      if (size > limit - held(key.first)) return nullptr;
      auto block = std::make_shared<ArenaBlock>();
      block->memory = at::empty({size}, at::TensorOptions(key.first).dtype(at::kByte));
      found = blocks.insert(blocks.end(), std::move(block));
    }
    ArenaBlock& block = **found;
    data = block.memory.mutable_data_ptr<uint8_t>() + block.taken;
    block.taken += bytes;
    block.in_use += bytes;
    ++block.tensors;
    return *found;
  }

  void release() {
    const std::scoped_lock lock(mutex_);
    for (auto& [key, blocks] : blocks_) {
      std::erase_if(blocks, [](const BlockPointer& block) { return block->tensors == 0; });
    }
  }

  detail::ArenaBytes bytes(c10::Device device) const {
    const std::scoped_lock lock(mutex_);
    detail::ArenaBytes sum{held(device), 0};
    each_block(device, [&](const ArenaBlock& block) { sum.in_use += block.in_use; });
    return sum;
  }

  std::vector<WorkspaceUse> workspaces() const {
    const std::scoped_lock lock(mutex_);
    std::vector<WorkspaceUse> uses;
    for (const auto& [key, blocks] : blocks_) {
      const auto& device = key.first;
      const bool is_known = std::ranges::any_of(
          uses, [&device](const WorkspaceUse& use) { return use.device == device; });
      if (!is_known && held(device) > 0) uses.push_back({"Arena", device, 0, 0, held(device)});
    }
    return uses;
  }

 private:
  template <typename Function>
  void each_block(c10::Device device, const Function& function) const {
    for (const auto& [key, blocks] : blocks_) {
      for (const BlockPointer& block : blocks) {
        if (key.first == device) function(*block);
      }
    }
  }

  int64_t held(c10::Device device) const {
    int64_t bytes = 0;
    each_block(device, [&bytes](const ArenaBlock& block) { bytes += block.size(); });
    return bytes;
  }

  mutable std::mutex mutex_;
  std::map<ArenaKey, std::vector<BlockPointer>, ArenaOrder> blocks_;
  const detail::WorkspaceOwner owner_{[this] { return workspaces(); }};
};

// Never destroyed: tensors may outlive everything else.
Arenas& arenas() {
  static auto* all = new Arenas;
  return *all;
}

c10::Device with_index(c10::Device device) {
  if (device.is_cpu() || device.has_index()) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

}  // namespace

detail::ArenaBytes detail::arena_bytes(c10::Device device) { return arenas().bytes(device); }

void release_arenas() { arenas().release(); }

at::Tensor efficient_tensor_creation(at::IntArrayRef shape, std::optional<c10::Device> device,
                                     std::optional<at::ScalarType> dtype) {
  for (const int64_t size : shape) {
    TORCH_CHECK_VALUE(size >= 0, "efficient_tensor_creation: shape is ", shape,
                      "; its sizes must not be negative");
  }
  const c10::Device place = with_index(device.value_or(c10::kCPU));
  const auto options =
      at::TensorOptions(place).dtype(dtype.value_or(c10::get_default_dtype_as_scalartype()));
  const int64_t needed =
      c10::multiply_integers(shape) * static_cast<int64_t>(options.dtype().itemsize());
  const int64_t bytes = (needed + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
  if (bytes == 0 || !(place.is_cpu() || place.is_cuda()) || detail::is_capturing(place) ||
      c10::impl::TorchDispatchModeTLS::any_modes_set()) {  // such as fake tensors
    return at::zeros(shape, options);
  }
  const c10::DeviceGuard guard(place);
  const auto stream = c10::impl::VirtualGuardImpl(place.type()).getStream(place).id();
  void* data = nullptr;
  BlockPointer block = arenas().take({place, stream}, bytes, data);
  if (block == nullptr) return at::zeros(shape, options);
  const auto leave = [block = std::move(block), bytes](void*) {
    block->in_use -= bytes;
    --block->tensors;
  };
  return at::from_blob(data, shape, leave, options).zero_();
}

}  // namespace torchium
