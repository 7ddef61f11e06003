#include "optim/sharing/cuda/block_moves.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/optimizer_step/move_blocks.h"
#include "optim/core/cuda/kernel_tables.h"
#include "optim/core/cuda/kernel_tensors.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <c10/util/Exception.h>

#include <limits>

namespace torchium::optim::detail {

#ifdef TORCHIUM_WITH_CUDA

bool has_move_kernel(const BlockMove& move) {
  const at::Tensor& target = move.target;
  return target.is_cuda() && (target.dim() == 1 || target.dim() == 2) && target.stride(-1) == 1 &&
         move.direction.scalar_type() == at::kFloat && target.scalar_type() != at::kDouble &&
         target.numel() <= std::numeric_limits<int>::max() - cuda_kernels::kBlockTile;
}

void move_by_kernels(const std::vector<BlockMove>& moves, const at::Tensor& lr,
                     double decoupled_weight_decay) {
  KernelTables<cuda_kernels::BlockEntry> tables;
  for (const auto& [target, direction] : moves) {
    const auto elements = static_cast<int>(target.numel());
    if (elements == 0) {
      continue;
    }
    const int64_t row_stride = target.dim() == 2 ? target.stride(0) : 0;
    const auto columns = static_cast<int>(target.size(-1));
    tables.add({.param = target.mutable_data_ptr(),
                .direction = direction.const_data_ptr<float>(),
                .row_stride = row_stride,
                .elements = elements,
                .columns = columns,
                .first_tile = 0,
                .type = element_type(target.scalar_type()),
                .by_fours = columns % 4 == 0 && row_stride % 4 == 0 && aligned_to_four(target) &&
                            aligned_to_four(direction)},
               (elements + cuda_kernels::kBlockTile - 1) / cuda_kernels::kBlockTile);
  }
  const at::Tensor readable = readable_learning_rate(lr);
  for (const auto& table : tables) {
    C10_CUDA_CHECK(cuda_kernels::move_blocks(table, learning_rate(readable),
                                             static_cast<float>(decoupled_weight_decay),
                                             c10::cuda::getCurrentCUDAStream()));
  }
}

#else

bool has_move_kernel(const BlockMove&) { return false; }

void move_by_kernels(const std::vector<BlockMove>&, const at::Tensor&, double) {
  TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}
#endif

}  // namespace torchium::optim::detail
