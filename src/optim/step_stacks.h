// Where a fused step keeps the blocks of its gradients, averages and directions. CUDA builds only.
#pragma once

#include "cuda_kernels/shampoo_step.h"
#include "linalg/stack_products.h"
#include "optim/stacks.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::optim::detail {

// Stacks of g, and of m unless that is g: of floats or, where that makes products faster, of halves
// (cuda_kernels/half_parts.h). Directions are floats.
class StepStacks {
 public:
  // `serves`: one flag a parameter; batches of others have no place here.
  StepStacks(const std::vector<MatrixBatch>& batches, const std::vector<bool>& serves,
             int64_t block_size, linalg::detail::MatmulPrecision precision,
             at::TensorOptions options, bool has_average);

  // Tells the parameters where their blocks begin. entries: one a parameter.
  void place(std::vector<cuda_kernels::ParameterEntry>& entries) const;

  // Allocates all but directions. Scales of halves: 0-dim, on the device.
  void set_aside(const at::Tensor& gradient_scale, const at::Tensor& average_scale);
  // Allocates directions if they are not there yet. Later than the rest: roots, which come in
  // between, need memory themselves.
  void set_aside_directions();

  bool is_of_halves(size_t b) const { return places_[b].of_halves; }
  // Matrices [start, start + count) of batch b, [count, n_1, n_2], n_2 = 1 for order one.
  linalg::detail::StackOperand gradient(size_t b) const;
  linalg::detail::StackOperand average(size_t b, int64_t start, int64_t count) const;
  at::Tensor direction(size_t b, int64_t start, int64_t count) const;

  // The addresses that kernels write to.
  void fill(cuda_kernels::StepBuffers& buffers) const;

 private:
  struct Place {
    int64_t first = 0;  // element of the stacks; multiples of kAlignment
    bool of_halves = false;
  };

  void find_places(const std::vector<bool>& serves);
  at::Tensor part(size_t b, const at::Tensor& stack, int64_t origin, int64_t start,
                  int64_t count) const;
  linalg::detail::StackOperand operand(size_t b, const at::Tensor& floats,
                                       const linalg::detail::StackOperand& halves, int64_t start,
                                       int64_t count) const;

  const std::vector<MatrixBatch>& batches_;
  int64_t block_size_;
  linalg::detail::MatmulPrecision precision_;
  at::TensorOptions options_;  // of float32 buffers
  bool has_average_;
  std::vector<Place> places_;  // of each batch; those of halves come first
  int64_t end_of_halves_ = 0, end_ = 0;
  at::Tensor gradients_, averages_, directions_;  // floats; the first two begin at end_of_halves_
  linalg::detail::StackOperand gradient_halves_, average_halves_;
};

}  // namespace torchium::optim::detail
