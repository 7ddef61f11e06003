#include "optim/sharing/cuda/block_moves.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/optimizer_step/move_blocks.h"
#include "optim/core/cuda/kernel_tables.h"
#include "optim/core/cuda/kernel_tensors.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <c10/util/Exception.h>

#include <cstddef>
#include <limits>

namespace torchium::optim::detail {

#ifdef TORCHIUM_WITH_CUDA

namespace {

// memory_of(tensor), values_of(values): their data.
template <typename Entry, typename MemoryOf, typename ValuesOf>
KernelTables<Entry> tables_of(const std::vector<TensorBlock>& blocks, const MemoryOf& memory_of,
                              const ValuesOf& values_of) {
  KernelTables<Entry> tables;
  for (const auto& [tensor, rows, values] : blocks) {
    const auto elements = static_cast<int>(values.numel());
    if (elements == 0) {
      continue;
    }
    const auto bytes = rows.offset * static_cast<int64_t>(tensor.element_size());
    const bool fours = rows.columns % 4 == 0 && rows.stride % 4 == 0 && rows.offset % 4 == 0 &&
                       aligned_to_four(tensor) && aligned_to_four(values);
    tables.add({.tensor = memory_of(tensor) + bytes,
                .values = values_of(values),
                .row_stride = rows.stride,
                .elements = elements,
                .columns = static_cast<int>(rows.columns),
                .first_tile = 0,
                .type = element_type(tensor.scalar_type()),
                .by_fours = fours},
               (elements + cuda_kernels::kBlockTile - 1) / cuda_kernels::kBlockTile);
  }
  return tables;
}

}  // namespace

bool has_block_kernel(const at::Tensor& tensor, const at::Tensor& values) {
  return tensor.is_cuda() && tensor.scalar_type() != at::kDouble &&
         values.scalar_type() == at::kFloat &&
         values.numel() <= std::numeric_limits<int>::max() - cuda_kernels::kBlockTile;
}

void move_by_kernels(const std::vector<TensorBlock>& blocks, const at::Tensor& lr,
                     double decoupled_weight_decay) {
  const at::Tensor readable = readable_learning_rate(lr);
  const auto tables = tables_of<cuda_kernels::MovedBlock>(
      blocks, [](const at::Tensor& p) { return static_cast<std::byte*>(p.mutable_data_ptr()); },
      [](const at::Tensor& d) { return d.const_data_ptr<float>(); });
  for (const auto& table : tables) {
    C10_CUDA_CHECK(cuda_kernels::move_blocks(table, learning_rate(readable),
                                             static_cast<float>(decoupled_weight_decay),
                                             c10::cuda::getCurrentCUDAStream()));
  }
}

void gather_by_kernels(const std::vector<TensorBlock>& blocks) {
  const auto tables = tables_of<cuda_kernels::GatheredBlock>(
      blocks, [](const at::Tensor& g) { return static_cast<const std::byte*>(g.const_data_ptr()); },
      [](const at::Tensor& values) { return values.mutable_data_ptr<float>(); });
  for (const auto& table : tables) {
    C10_CUDA_CHECK(cuda_kernels::gather_blocks(table, c10::cuda::getCurrentCUDAStream()));
  }
}

#else

bool has_block_kernel(const at::Tensor&, const at::Tensor&) { return false; }

void move_by_kernels(const std::vector<TensorBlock>& blocks, const at::Tensor&, double) {
  TORCH_INTERNAL_ASSERT(blocks.empty(), "this build has no CUDA kernels");
}
void gather_by_kernels(const std::vector<TensorBlock>& blocks) {
  TORCH_INTERNAL_ASSERT(blocks.empty(), "this build has no CUDA kernels");
}
#endif

}  // namespace torchium::optim::detail
