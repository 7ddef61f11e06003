// Directions of K-FAC on Hopper's tensor cores: every operand as two fp16 numbers (split_fp16.h),
// for nearly float32 precision. CUDA builds only.
#pragma once

#include "cuda_kernels/optimizer_step/kfac_step.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchium::optim::detail {

// A layer with the root of G, [groups, rows, rows], and that of A, [groups, columns, columns]. V is
// [groups, rows, pitch] in the buffers; its columns beyond those of A are zero.
struct SplitLayer {
  const float *left, *right;
  int64_t start;  // of V in both buffers
  int64_t groups, rows, columns, pitch;
};

// Whether the current device multiplies such matrices.
bool has_split_products(int64_t rows, int64_t columns);

// The least pitch.
int64_t split_pitch(int64_t columns);

class SplitProducts {
 public:
  // Returns the number of the layer.
  size_t add(const SplitLayer& layer);
  bool empty() const { return layers_.empty(); }
  // Allocates what stays, after the last layer.
  void finish(const at::TensorOptions& options);
  // Where the largest magnitude of V of a layer belongs, as bits.
  unsigned* largest(size_t layer) const;
  // Before the largest magnitudes are found.
  void clear() const;
  // first <- (left V) right for V in `first`; `second` is overwritten. single: with 11 bits.
  void run(const cuda_kernels::KfacBuffers& buffers, bool single) const;

 private:
  enum Operand : size_t { kLeft, kRight, kV, kProduct, kOperands };

  int64_t elements(const SplitLayer& layer) const;
  float* number(size_t layer, Operand operand) const;
  void run_part(size_t begin, size_t end, const at::Tensor& parts,
                const cuda_kernels::KfacBuffers& buffers, bool single) const;

  std::vector<SplitLayer> layers_;
  at::Tensor numbers_;  // [2, layers, kOperands]: largest magnitudes as bits, scales
};

}  // namespace torchium::optim::detail
