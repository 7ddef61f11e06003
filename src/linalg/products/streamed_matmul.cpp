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

// One operand, cut into chunks of rows (of A) or columns (of B), of which some are on the device.
struct Chunks {
  at::Tensor matrix;
  int64_t dimension;  // that is cut
  int64_t chunk;
  bool on_host;
  std::vector<Slot> slots;  // that chunks from the host are copied to
  // Of chunk i at i modulo their number.
  std::vector<at::Tensor> copies;
  std::vector<TileOperand> operands;

  int64_t total() const { return matrix.size(dimension); }
  int64_t count() const { return (total() + chunk - 1) / chunk; }
  int64_t size(int64_t i) const { return std::min(chunk, total() - i * chunk); }
  Slot& slot(int64_t i) { return slots[i % slots.size()]; }
  TileOperand& operand(int64_t i) { return operands[i % operands.size()]; }
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

// Copies in, products and copies out run on three streams.
class StreamedProduct {
 public:
  StreamedProduct(const StreamPlan& plan, TileProduct product, const at::TensorOptions& options)
      : plan_(plan), product_(std::move(product)), options_(options) {}

  void run(const at::Tensor& out, const at::Tensor& A, const at::Tensor& B) {
    // The side streams write into the slots. They begin after the work of the current stream so
    // far, and it goes on after theirs, so the memory belongs to it.
    Chunks rows = chunks_of(A, 0, plan_.rows, plan_.rows_on_device);
    Chunks columns = chunks_of(B, 1, plan_.columns, plan_.columns_on_device);
    for (Slot& slot : results_) {
      if (plan_.result_on_host) slot.buffer = at::empty({plan_.rows * plan_.columns}, options_);
    }
    torchium::detail::SideStreams streams(options_.device(), 3);
    const auto stream = [&](size_t i) {
      return c10::cuda::getStreamFromExternal(streams[std::min(i, streams.size() - 1)],
                                              options_.device().index());
    };
    const auto in = stream(1), back = stream(2);
    const HostCopies copies(in, back);
    in_ = &in;
    back_ = &back;
    multiply_all(out, A, B, rows, columns);
    copies.wait();
    streams.join();
  }

 private:
  c10::cuda::CUDAStream current() const {
    return c10::cuda::getCurrentCUDAStream(options_.device().index());
  }

  Chunks chunks_of(const at::Tensor& matrices, int64_t dimension, int64_t chunk,
                   int64_t on_device) const {
    const int64_t total = matrices.size(dimension - 2), k = matrices.size(-1 - dimension);
    Chunks chunks{at::Tensor(), dimension, chunk, matrices.is_cpu(), {}, {}, {}};
    const int64_t count = (total + chunk - 1) / chunk;
    chunks.slots.resize(slots_of(product_.is_split(), on_device, count));
    for (Slot& slot : chunks.slots) {
      if (chunks.on_host) slot.buffer = at::empty({chunk * k}, options_);
    }
    chunks.copies.resize(on_device);
    chunks.operands.resize(on_device);
    return chunks;
  }

  void multiply_all(const at::Tensor& out, const at::Tensor& A, const at::Tensor& B, Chunks& rows,
                    Chunks& columns) {
    if (out.dim() > 2) {
      for (int64_t i = 0; i < out.size(0); ++i) multiply_all(out[i], A[i], B[i], rows, columns);
      return;
    }
    rows.matrix = A;
    columns.matrix = B;
    const bool holds_rows = plan_.rows_on_device == rows.count();
    const bool holds_columns = plan_.columns_on_device == columns.count();
    if (holds_rows && holds_columns) {
      multiply_growing(out, rows, columns);
    } else if (plan_.rows_on_device > plan_.columns_on_device) {
      multiply_panels(out, rows, columns, rows, columns);
    } else {
      multiply_panels(out, columns, rows, rows, columns);
    }
  }

  // All chunks stay. Every new one meets all of the other operand, so that there is much to do
  // while the next is copied.
  void multiply_growing(const at::Tensor& out, Chunks& rows, Chunks& columns) {
    const int64_t all_rows = rows.count(), all_columns = columns.count();
    for (int64_t i = 0, j = 0; i < all_rows || j < all_columns;) {
      if (i < all_rows && i * all_columns <= j * all_rows) {
        load(rows, i);
        for (int64_t c = 0; c < j; ++c) write(out, rows, i, columns, c);
        ++i;
      } else {
        load(columns, j);
        for (int64_t r = 0; r < i; ++r) write(out, rows, r, columns, j);
        ++j;
      }
    }
  }

  // Some chunks of one operand stay while all of the other pass.
  void multiply_panels(const at::Tensor& out, Chunks& kept, Chunks& passing, Chunks& rows,
                       Chunks& columns) {
    const auto at_a_time = static_cast<int64_t>(kept.operands.size());
    for (int64_t first = 0; first < kept.count(); first += at_a_time) {
      const int64_t last = std::min(first + at_a_time, kept.count());
      for (int64_t i = 0; i < passing.count(); ++i) {
        load(passing, i);
        for (int64_t j = first; j < last; ++j) {
          if (i == 0) load(kept, j);
          write(out, rows, &kept == &rows ? j : i, columns, &kept == &rows ? i : j);
        }
      }
    }
  }

  // Brings a chunk to the device, as the product reads it.
  void load(Chunks& chunks, int64_t i) {
    at::Tensor part = chunks.matrix.narrow(chunks.dimension, i * chunks.chunk, chunks.size(i));
    Slot& slot = chunks.slot(i);
    if (chunks.on_host) {
      const bool has_rows = chunks.matrix.stride(1) == 1;
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
    at::Tensor& copy = chunks.copies[i % chunks.copies.size()];
    chunks.operand(i) = chunks.dimension == 0 ? product_.row_operand(batch, copy)
                                              : product_.column_operand(batch, copy);
    slot.emptied.record(current());  // of split operands the parts alone are read again
  }

  void write(const at::Tensor& out, Chunks& rows, int64_t i, Chunks& columns, int64_t j) {
    const at::Tensor part =
        out.narrow(0, i * rows.chunk, rows.size(i)).narrow(1, j * columns.chunk, columns.size(j));
    at::Tensor product = part.unsqueeze(0);
    Slot& result = results_[written_++ % 2];
    if (plan_.result_on_host) {
      product = result.buffer.narrow(0, 0, part.numel()).view(product.sizes());
      result.emptied.block(current());
    }
    product_.multiply(product, rows.operand(i), columns.operand(j));
    if (!product_.is_split()) {
      rows.slot(i).emptied.record(current());
      columns.slot(j).emptied.record(current());
    }
    if (plan_.result_on_host) {
      result.filled.record(current());
      result.filled.block(*back_);
      copy_matrix(part, product[0], *back_);
      result.emptied.record(*back_);
    }
  }

  StreamPlan plan_;
  TileProduct product_;
  at::TensorOptions options_;
  std::array<Slot, 2> results_;
  int64_t written_ = 0;
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
