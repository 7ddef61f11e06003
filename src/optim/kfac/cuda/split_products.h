// Directions of K-FAC on Hopper's tensor cores: every operand as two fp16 numbers (split_fp16.h),
// for nearly float32 precision. CUDA builds only.
#pragma once

#include "cuda_kernels/optimizer_step/kfac_step.h"
#include "cuda_kernels/split_gemm/split_fp16.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
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
  // Allocates what stays, after the last layer. may_keep: whether parts of roots may stay, which
  // need to see every run() after a change of roots: replays of a caller's graph do not.
  void finish(const at::TensorOptions& options, bool may_keep);
  // Where the largest magnitude of V of a layer belongs, as bits.
  unsigned* largest(size_t layer) const;
  // Before the largest magnitudes are found.
  void clear() const;
  // first <- (left V) right for V in `first`; `second` is overwritten. single: with 11 bits.
  // versions: of all roots together, another one after each change; none: not known.
  void run(const cuda_kernels::KfacBuffers& buffers, bool single, std::optional<int64_t> versions);

  // Adds what the launches of the next run() depend on. False: it splits roots that later ones
  // have.
  bool add_to(GraphKey& key, bool single, std::optional<int64_t> versions) const;

  // The parts of the roots stay from step to step if they take at most this share of the device's
  // memory.
  static constexpr double kShareOfDevice = 0.01;
  const at::Tensor& kept() const { return kept_; }  // undefined: none

 private:
  enum Operand : size_t { kLeft, kRight, kV, kProduct, kOperands };

  // A batch, and its parts at a place of `parts` [1 or 2, elements]: hi, lo.
  cuda_kernels::SplitEntry entry(size_t layer, Operand operand, const float* x,
                                 const at::Tensor& parts, int64_t place) const;
  float* number(size_t layer, Operand operand) const;
  at::Tensor parts_of(int64_t elements, bool single) const;
  bool has_kept(bool single) const;
  bool keep_roots(bool single, std::optional<int64_t> versions);
  void split_roots(size_t begin, size_t end, const at::Tensor& roots) const;
  void multiply(size_t begin, size_t end, const at::Tensor& roots,
                const cuda_kernels::KfacBuffers& buffers) const;

  std::vector<SplitLayer> layers_;
  std::vector<int64_t> root_places_{0};  // of each layer, and the end of the last
  at::Tensor numbers_;  // [2, layers, kOperands]: largest magnitudes as bits, scales
  bool may_keep_ = false;
  at::Tensor kept_;  // parts of all roots
  std::optional<int64_t> kept_versions_;
};

}  // namespace torchium::optim::detail
