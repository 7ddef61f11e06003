// The matrix products of a fused step, of all blocks in few launches. CUDA builds only.
#pragma once

#include "cuda_kernels/optimizer_step/step_control.h"
#include "linalg/products/batched_products.h"
#include "optim/blocked/block_storage.h"
#include "optim/blocked/cuda/block_workspace.h"

#include <cstdint>
#include <cuda_runtime_api.h>
#include <span>
#include <vector>

namespace torchium::optim::detail {

class BlockProducts {
 public:
  BlockProducts(std::span<const MatrixBatch> batches, const BlockWorkspace& storage,
                linalg::detail::MatmulPrecision precision, cudaStream_t stream)
      : batches_(batches), workspace_(storage), precision_(precision), stream_(stream) {}

  // L_i <- b2 L_i + (1 - b2) mat_i(g) mat_i(g)^T. control: on the device.
  void update_statistics(const cuda_kernels::StepControl* control) const;
  // Some matrices of a batch.
  struct Piece {
    size_t batch;
    int64_t start, count;
  };
  // d = m x_1 R_1 ... x_k R_k, of the blocks of these.
  void precondition(const std::vector<Piece>& blocks) const;

 private:
  class PartOperands;

  // Operands are their hi parts alone.
  bool is_single() const { return precision_ == linalg::detail::MatmulPrecision::kHigh; }
  std::vector<std::vector<Piece>> split_parts(const std::vector<Piece>& blocks) const;
  void precondition_part(const std::vector<Piece>& part, PartOperands& operands) const;
  void precondition_floats(const Piece& blocks) const;

  std::span<const MatrixBatch> batches_;
  const BlockWorkspace& workspace_;
  linalg::detail::MatmulPrecision precision_;
  cudaStream_t stream_;
};

}  // namespace torchium::optim::detail
