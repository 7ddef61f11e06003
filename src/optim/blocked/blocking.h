// How a parameter is reshaped and cut into the blocks that are preconditioned separately.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace torchium::optim::detail {

// All blocks of one shape of one parameter: a regular grid inside the merged tensor.
struct BlockShape {
  std::vector<int64_t> sizes;    // of one block, per dimension
  std::vector<int64_t> counts;   // blocks per dimension
  std::vector<int64_t> offsets;  // of the grid, per dimension

  int64_t count() const;  // all blocks
};

struct Blocking {
  std::vector<int64_t> dims;       // after merged_dims()
  std::vector<BlockShape> shapes;  // at most 2^order: whole blocks and remainders

  int64_t order() const { return static_cast<int64_t>(dims.size()); }
  bool is_one_block() const { return shapes.size() == 1 && shapes[0].count() == 1; }
};

// Unit dimensions are dropped. With merge_dims a convolution [out, in, kh, kw] becomes
// [out, in kh kw], and other tensors merge adjacent dimensions, from the last backwards, while the
// product stays within block_size and more than two are left. With a target_order all tensors merge
// in this way while more than target_order are left; 0: the shape stays, with its unit dimensions.
std::vector<int64_t> merged_dims(at::IntArrayRef shape, int64_t block_size, bool merge_dims,
                                 std::optional<int64_t> target_order);

// Blocks of at most block_size per dimension; a remainder is a block of its own.
Blocking make_blocking(std::vector<int64_t> dims, int64_t block_size);

// The blocks of `shape` inside `tensor` as a view [counts..., sizes...]. `tensor` has the elements
// of the parameter and can be viewed as blocking.dims.
at::Tensor block_view(const at::Tensor& tensor, const Blocking& blocking, const BlockShape& shape);

}  // namespace torchium::optim::detail
