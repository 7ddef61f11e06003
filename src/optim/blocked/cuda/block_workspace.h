// Where a fused step keeps the blocks of its gradients, averages and directions. CUDA builds only.
#pragma once

#include "cuda_kernels/optimizer_step/shampoo_step.h"
#include "linalg/products/batched_products.h"
#include "optim/blocked/block_storage.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// Batches of the blocks of g, and of m unless that is g: as fp16 parts
// (cuda_kernels/split_gemm/split_fp16.h) where the device has a kernel for their products, else as
// floats. Directions are floats.
class BlockWorkspace {
 public:
  // The batches live as long as this.
  BlockWorkspace(std::span<const MatrixBatch> batches, int64_t block_size,
                 at::TensorOptions options, bool has_average);

  // Writes where the blocks of each parameter begin. entries: one per parameter.
  void place(std::vector<cuda_kernels::ParameterEntry>& entries) const;

  // Allocates all but directions.
  void set_aside(linalg::detail::MatmulPrecision precision);
  // Allocates directions. Later than the rest: roots, which come in between, need memory
  // themselves.
  void set_aside_directions();
  const at::Tensor& directions() const { return directions_; }
  void set_directions(at::Tensor directions) { directions_ = std::move(directions); }
  void free_all();

  bool is_split(size_t b) const { return places_[b].is_split; }

  // All matrices of batch b, from matrix `start` on.
  cuda_kernels::SplitFp16 split_gradient(size_t b) const;
  cuda_kernels::SplitFp16 split_average(size_t b, int64_t start) const;
  float* direction_floats(size_t b, int64_t start) const;
  // The same of floats, [count, n_1, n_2], n_2 = 1 for order one.
  at::Tensor gradient(size_t b) const;
  at::Tensor average(size_t b) const;
  at::Tensor direction(size_t b) const;

  // The addresses that kernels write to.
  void fill(cuda_kernels::StepBuffers& buffers) const;

 private:
  struct Place {
    int64_t first = 0;         // element of the storage; multiples of kAlignment
    int64_t first_matrix = 0;  // of the batch, among all blocks of fp16 parts
    bool is_split = false;
  };

  at::Tensor part(size_t b, const at::Tensor& buffer, int64_t origin) const;
  cuda_kernels::SplitFp16 split(const at::Tensor& storage, const at::Tensor& scales, size_t b,
                                int64_t start) const;

  std::span<const MatrixBatch> batches_;
  int64_t block_size_;
  at::TensorOptions options_;  // of float32 buffers
  bool has_average_;
  std::vector<Place> places_;  // of each batch; those that are split come first
  int64_t split_end_ = 0, end_ = 0, split_matrices_ = 0;
  at::Tensor gradients_, averages_, directions_;  // floats; the first two begin at split_end_
  at::Tensor split_gradients_, split_averages_;   // [1 or 2, split_end_]: hi, lo
  at::Tensor gradient_scales_, average_scales_;   // [split_matrices_]
};

}  // namespace torchium::optim::detail
