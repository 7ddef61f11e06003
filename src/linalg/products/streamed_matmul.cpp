#include "linalg/products/streamed_matmul.h"

#include <c10/util/Exception.h>

#ifdef TORCHIUM_WITH_CUDA
#include "linalg/products/stream_plan.h"
#include "linalg/products/tile_product.h"
#include "support/side_streams.h"

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <vector>
#endif

namespace torchium::linalg::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

// Memory of the device that a copy fills while another is in use.
struct Slot {
  at::Tensor buffer;
  at::cuda::CUDAEvent filled, emptied;
};

// One operand, cut into chunks of rows (of A) or columns (of B).
struct Source {
  at::Tensor matrix;
  int64_t dimension;  // that is cut
  int64_t chunk;
  bool on_host;
};

// Matrices of equal orientation, each with contiguous rows or columns.
void copy_matrix(const at::Tensor& to, const at::Tensor& from, cudaStream_t stream) {
  const bool has_rows =
      from.stride(1) == 1 && (from.size(0) == 1 || from.stride(0) >= from.size(1));
  const int64_t lines = from.size(has_rows ? 0 : 1), length = from.size(has_rows ? 1 : 0);
  const auto bytes = static_cast<size_t>(from.element_size());
  const auto pitch = [&](const at::Tensor& x) {
    return bytes * (lines == 1 ? length : x.stride(has_rows ? 0 : 1));
  };
  C10_CUDA_CHECK(cudaMemcpy2DAsync(to.mutable_data_ptr(), pitch(to), from.const_data_ptr(),
                                   pitch(from), bytes * length, lines, cudaMemcpyDefault, stream));
}

// Waits for the copies of the host's memory, also after an error.
class HostCopies {
 public:
  HostCopies(cudaStream_t in, cudaStream_t out) : in_(in), out_(out) {}
  ~HostCopies() {
    cudaStreamSynchronize(in_);
    cudaStreamSynchronize(out_);
  }
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;

  void wait() const {
    C10_CUDA_CHECK(cudaStreamSynchronize(in_));
    C10_CUDA_CHECK(cudaStreamSynchronize(out_));
  }

 private:
  cudaStream_t in_, out_;
};

// The chunks of one operand stay on the device while those of the other pass through two buffers.
// Copies in, products and copies out run on three streams.
class StreamedProduct {
 public:
  StreamedProduct(const StreamPlan& plan, TileProduct product, const at::TensorOptions& options)
      : plan_(plan), product_(std::move(product)), options_(options) {}

  void run(const at::Tensor& out, const at::Tensor& A, const at::Tensor& B) {
    // The side streams write into these buffers. They begin after the work of the current stream so
    // far, and it goes on after theirs, so the buffers belong to it.
    allocate(A, B);
    torchium::detail::SideStreams streams(options_.device(), 3);
    const auto stream = [&](size_t i) {
      return c10::cuda::getStreamFromExternal(streams[std::min(i, streams.size() - 1)],
                                              options_.device().index());
    };
    const auto in = stream(1), back = stream(2);
    const HostCopies copies(in, back);
    in_ = &in;
    back_ = &back;
    multiply_all(out, A, B);
    copies.wait();
    streams.join();
  }

 private:
  c10::cuda::CUDAStream current() const {
    return c10::cuda::getCurrentCUDAStream(options_.device().index());
  }

  Source row_source(const at::Tensor& A) const { return {A, 0, plan_.rows, A.is_cpu()}; }
  Source column_source(const at::Tensor& B) const { return {B, 1, plan_.columns, B.is_cpu()}; }

  void allocate(const at::Tensor& A, const at::Tensor& B) {
    const int64_t k = A.size(-1);
    const Source a = row_source(A), b = column_source(B);
    const Source &kept = plan_.keeps_rows ? a : b, &passing = plan_.keeps_rows ? b : a;
    const auto buffer = [&](int64_t elements) { return at::empty({elements}, options_); };
    kept_.resize(plan_.kept_chunks);
    kept_copies_.resize(plan_.kept_chunks);
    kept_operands_.resize(plan_.kept_chunks);
    // Split operands keep their parts alone.
    kept_slots_ = product_.is_split() ? std::min<int64_t>(2, plan_.kept_chunks) : plan_.kept_chunks;
    for (int64_t i = 0; kept.on_host && i < kept_slots_; ++i)
      kept_[i].buffer = buffer(kept.chunk * k);
    for (Slot& slot : passing_) {
      if (passing.on_host) slot.buffer = buffer(passing.chunk * k);
    }
    for (Slot& slot : results_) {
      if (plan_.result_on_host) slot.buffer = buffer(plan_.rows * plan_.columns);
    }
  }

  void multiply_all(const at::Tensor& out, const at::Tensor& A, const at::Tensor& B) {
    if (out.dim() == 2) {
      const Source a = row_source(A), b = column_source(B);
      return plan_.keeps_rows ? multiply(out, a, b) : multiply(out, b, a);
    }
    for (int64_t i = 0; i < out.size(0); ++i) multiply_all(out[i], A[i], B[i]);
  }

  void multiply(const at::Tensor& out, const Source& kept, const Source& passing) {
    const int64_t kept_size = kept.matrix.size(kept.dimension);
    const int64_t passing_size = passing.matrix.size(passing.dimension);
    for (int64_t panel = 0; panel < kept_size; panel += plan_.kept_chunks * kept.chunk) {
      const int64_t end = std::min(kept_size, panel + plan_.kept_chunks * kept.chunk);
      for (int64_t begin = 0; begin < passing_size; begin += passing.chunk) {
        const int64_t count = std::min(passing.chunk, passing_size - begin);
        Slot& slot = passing_[passed_++ % 2];
        const TileOperand operand = load(passing, begin, count, slot, passing_copy_);
        for (int64_t at = panel; at < end; at += kept.chunk) {
          const int64_t chunk = (at - panel) / kept.chunk, size = std::min(kept.chunk, end - at);
          Slot& kept_slot = kept_[chunk % kept_slots_];
          if (begin == 0) {
            kept_operands_[chunk] = load(kept, at, size, kept_slot, kept_copies_[chunk]);
          }
          const at::Tensor part =
              out.narrow(kept.dimension, at, size).narrow(passing.dimension, begin, count);
          write(part, plan_.keeps_rows ? kept_operands_[chunk] : operand,
                plan_.keeps_rows ? operand : kept_operands_[chunk]);
          if (!product_.is_split()) kept_slot.emptied.record(current());
        }
        if (!product_.is_split()) slot.emptied.record(current());
      }
    }
  }

  // A chunk on the device, as the product reads it.
  TileOperand load(const Source& source, int64_t begin, int64_t count, Slot& slot,
                   at::Tensor& copy) {
    at::Tensor part = source.matrix.narrow(source.dimension, begin, count);
    if (source.on_host) {
      const bool has_rows = source.matrix.stride(1) == 1;
      const at::Tensor memory = slot.buffer.narrow(0, 0, part.numel());
      const at::Tensor target =
          has_rows ? memory.view(part.sizes()) : memory.view({part.size(1), part.size(0)}).mT();
      slot.emptied.block(*in_);
      copy_matrix(target, part, *in_);
      slot.filled.record(*in_);
      slot.filled.block(current());
      part = target;
    }
    const at::Tensor batch = part.unsqueeze(0);
    const TileOperand operand = source.dimension == 0 ? product_.row_operand(batch, copy)
                                                      : product_.column_operand(batch, copy);
    if (product_.is_split()) slot.emptied.record(current());
    return operand;
  }

  void write(const at::Tensor& part, const TileOperand& A, const TileOperand& B) {
    at::Tensor out = part.unsqueeze(0);
    if (!plan_.result_on_host) return product_.multiply(out, A, B);
    Slot& slot = results_[written_++ % 2];
    out = slot.buffer.narrow(0, 0, part.numel()).view(out.sizes());
    slot.emptied.block(current());
    product_.multiply(out, A, B);
    slot.filled.record(current());
    slot.filled.block(*back_);
    copy_matrix(part, out[0], *back_);
    slot.emptied.record(*back_);
  }

  StreamPlan plan_;
  TileProduct product_;
  at::TensorOptions options_;
  std::vector<Slot> kept_;
  std::vector<at::Tensor> kept_copies_;
  std::vector<TileOperand> kept_operands_;
  int64_t kept_slots_ = 0;
  std::array<Slot, 2> passing_, results_;
  at::Tensor passing_copy_;
  int64_t passed_ = 0, written_ = 0;
  const c10::cuda::CUDAStream *in_ = nullptr, *back_ = nullptr;
};

// Copies to the device need contiguous rows or columns.
at::Tensor copyable(const at::Tensor& x) {
  return x.is_cpu() && !blas_readable(x) ? x.contiguous() : x;
}

}  // namespace

void streamed_matmul(const at::Tensor& out, const at::Tensor& A, const at::Tensor& B,
                     c10::Device device, const ProductOptions& options) {
  const at::Tensor left = copyable(A), right = copyable(B);
  const at::TensorOptions on_device = A.options().device(device).pinned_memory(false);
  TileProduct product(A.scalar_type(), device, matmul_precision(options.precision));
  const StreamPlan plan = plan_stream(out, left, right, device, options, product);
  StreamedProduct(plan, std::move(product), on_device).run(out, left, right);
}
#else

void streamed_matmul(const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::Device,
                     const ProductOptions&) {
  TORCH_INTERNAL_ASSERT(false);
}
#endif

}  // namespace torchium::linalg::detail
