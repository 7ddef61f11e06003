// The directions of all layers, with one product for all layers of a shape. CUDA builds only.
#pragma once

#include "cuda_kernels/optimizer_step/kfac_step.h"
#include "optim/core/cuda/kernel_tables.h"
#include "optim/kfac/cuda/split_products.h"
#include "optim/kfac/kfac_subset.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// Keeps the tables of the kernels from step to step; memory is allocated for one step alone.
class LayerProducts {
 public:
  // For these layers of the group, which must outlive this object.
  LayerProducts(const KfacGroup& group, const std::vector<size_t>& layers);

  // Makes room for another V of this many elements, which no product changes, in the first buffer.
  // Returns its start.
  int64_t add(int64_t elements);

  // Where V and the direction of the k-th of them are.
  struct Place {
    int64_t start;      // of both, in the buffers
    int64_t pitch;      // elements from row to row
    bool in_second;     // the direction; V is in the first buffer
    unsigned* largest;  // KfacEntry
  };
  Place place(size_t k) const;

  // Allocates the buffers, and reads the damping of this step. A column of V that no parameter
  // fills is zero.
  void set_aside();
  cuda_kernels::KfacBuffers buffers() const;
  const at::Tensor& buffer(bool second) const { return second ? second_ : first_; }
  // V -> (G + ..I)^-1 V (A + ..I)^-1, or the same with eigenvectors.
  void precondition();
  // Adds what the launches of the next precondition() depend on besides the options. False: later
  // ones launch something else.
  bool add_to(GraphKey& key) const;
  void free_all();
  const at::Tensor& kept() const { return split_.kept(); }

 private:
  // Layers of one shape. V: [rows, columns] in each group.
  struct Shape {
    int64_t rows, columns;
    bool has_left, has_right;  // whether the roots of G and A are matrices
    int64_t pitch = 0;
    bool is_split = false;  // multiplied by split_products.h, else by cuBLAS
    bool leaves_in_second = false;
    int64_t first = 0, count = 0;  // matrices in the arrays of addresses

    int products() const { return has_left + has_right; }  // of one pass
  };

  bool is_exact() const { return group_.shared.damping_split == DampingSplit::kExact; }
  void find_shapes(const std::vector<size_t>& layers);
  void find_places(const std::vector<size_t>& layers);
  void add_split_layers(const std::vector<size_t>& layers);
  void add_entries(const std::vector<size_t>& layers);
  void write_addresses() const;
  float** addresses(int64_t array) const;
  void multiply(int pass, bool transpose_left, bool transpose_right) const;
  void divide() const;
  std::optional<int64_t> versions_of_roots() const;

  const KfacGroup& group_;
  at::TensorOptions options_;  // of float32 buffers
  std::vector<Shape> shapes_;
  std::vector<size_t> shape_of_;  // of each layer
  std::vector<int64_t> starts_;   // of each layer in the buffers
  int64_t elements_ = 0, matrices_ = 0;
  bool has_unused_column_ = false;
  SplitProducts split_;
  std::vector<int64_t> split_of_;  // of each layer; -1: none
  std::vector<size_t> split_layers_;
  KernelTables<cuda_kernels::AddressEntry> address_tables_;
  KernelTables<cuda_kernels::EigenvalueEntry> eigenvalue_tables_;
  std::vector<std::pair<size_t, size_t>> eigenvalue_places_;  // layer and entry
  // Of one step.
  at::Tensor first_, second_;
  at::Tensor addresses_;  // [4, matrices]: V in the two buffers, the roots of G, those of A
};

// The root if it is a diagonal, else null.
const float* diagonal_root(const at::Tensor& root);

// Tiles of kKfacTile elements.
int kfac_tiles(int64_t elements);

}  // namespace torchium::optim::detail
