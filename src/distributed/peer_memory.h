// Memory that the devices of all ranks read directly, by their copy engines.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
class Store;
namespace symmetric_memory {
class SymmetricMemory;
}  // namespace symmetric_memory
}  // namespace c10d

namespace torchium::distributed {

class Communicator;

// For ranks on one host whose devices have peer access: a copy between two H200 by NVLink takes 0.6
// times as long as in an all-gather of NCCL, and no multiprocessors.
class PeerMemory {
 public:
  // Null: there is none for others to read on this device. Waits for the device, as does the
  // destructor; neither may run in the capture of a CUDA graph.
  static std::unique_ptr<PeerMemory> allocate(int64_t bytes, c10::Device device);
  ~PeerMemory();

  // The memory of this rank: bytes.
  const at::Tensor& own() const { return own_; }

  // Lets all ranks read each other's memory, as many bytes on each, of which `own` is that of this
  // one; null: it has none. All ranks must call it, once. False on all of them: they are on several
  // hosts, or some have no memory or no peer access. The host waits for all ranks.
  static bool share(PeerMemory* own, const Communicator& ranks, c10::Device device);

  // Those below need share().

  // On the current stream: waits until the streams of all ranks have come to this call, at most as
  // long as the hosts wait for each other. What they have written before it can be read after it.
  void barrier() const;

  // Bytes of another rank, from `offset` on, and the contiguous tensor that they fill.
  struct Read {
    int64_t rank, offset;
    at::Tensor target;
  };
  // Starts to read on a stream of its own, after what the current one has been given. The returned
  // function makes the current stream wait.
  std::function<void()> begin_reads(const std::vector<Read>& reads) const;

 private:
  explicit PeerMemory(at::Tensor own);
  void find_others(const Communicator& ranks, const std::string& group);

  at::Tensor own_;
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> handle_;
  std::vector<at::Tensor> of_rank_;
  size_t timeout_ms_ = 0;
  c10::Stream stream_;
};

}  // namespace torchium::distributed
