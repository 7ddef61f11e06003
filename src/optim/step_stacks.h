// Where a fused step keeps the blocks of its gradients, averages and directions. CUDA builds only.
#pragma once

#include "cuda_kernels/shampoo_step.h"
#include "linalg/stack_products.h"
#include "optim/stacks.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::optim::detail {

// Stacks of g, and of m unless that is g: of halves (cuda_kernels/half_parts.h) where the device
// has a kernel for their products, else of floats. Directions are floats.
class StepStacks {
 public:
  // `serves`: one flag a parameter; batches of others have no place here.
  StepStacks(const std::vector<MatrixBatch>& batches, const std::vector<bool>& serves,
             int64_t block_size, at::TensorOptions options, bool has_average);

  // Tells the parameters where their blocks begin. entries: one a parameter.
  void place(std::vector<cuda_kernels::ParameterEntry>& entries) const;

  // Allocates all but directions.
  void set_aside(linalg::detail::MatmulPrecision precision);
  // Allocates directions. Later than the rest: roots, which come in between, need memory
  // themselves.
  void set_aside_directions();
  void free_all();

  bool serves(size_t b) const { return places_[b].is_served; }
  bool is_of_halves(size_t b) const { return places_[b].of_halves; }

  // All matrices of batch b, from matrix `start` on.
  cuda_kernels::HalfStack gradient_halves(size_t b) const;
  cuda_kernels::HalfStack average_halves(size_t b, int64_t start) const;
  float* direction_floats(size_t b, int64_t start) const;
  // The same of floats, [count, n_1, n_2], n_2 = 1 for order one.
  at::Tensor gradient(size_t b) const;
  at::Tensor average(size_t b) const;
  at::Tensor direction(size_t b) const;

  // The addresses that kernels write to.
  void fill(cuda_kernels::StepBuffers& buffers) const;

 private:
  struct Place {
    int64_t first = 0;         // element of the stacks; multiples of kAlignment
    int64_t first_matrix = 0;  // of the batch, among all blocks of fp16 parts
    bool is_served = false;
    bool of_halves = false;
  };

  void find_places(const std::vector<bool>& serves);
  at::Tensor part(size_t b, const at::Tensor& stack, int64_t origin) const;
  cuda_kernels::HalfStack halves(const at::Tensor& stacks, const at::Tensor& scales, size_t b,
                                 int64_t start) const;

  const std::vector<MatrixBatch>& batches_;
  int64_t block_size_;
  at::TensorOptions options_;  // of float32 buffers
  bool has_average_;
  std::vector<Place> places_;  // of each batch; those of halves come first
  int64_t end_of_halves_ = 0, end_ = 0, matrices_of_halves_ = 0;
  at::Tensor gradients_, averages_, directions_;  // floats; the first two begin at end_of_halves_
  at::Tensor gradient_halves_, average_halves_;   // [1 or 2, end_of_halves_]: hi, lo
  at::Tensor gradient_scales_, average_scales_;   // [matrices_of_halves_]
};

}  // namespace torchium::optim::detail
