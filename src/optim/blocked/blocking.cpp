#include "optim/blocked/blocking.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace torchium::optim::detail {
namespace {

struct Segment {
  int64_t size;
  int64_t count;
  int64_t offset;
};

// A dimension as whole blocks and, where block_size does not divide it, a remainder.
std::vector<Segment> segments(int64_t length, int64_t block_size) {
  const int64_t whole = length / block_size;
  const int64_t rest = length - whole * block_size;
  std::vector<Segment> result;
  if (whole > 0) {
    result.push_back({block_size, whole, 0});
  }
  if (rest > 0) {
    result.push_back({rest, 1, whole * block_size});
  }
  return result;
}

// Neighbours become one dimension, from the last backwards, while their product is at most `limit`
// and more than `order` dimensions are left.
std::vector<int64_t> joined_neighbours(const std::vector<int64_t>& dims, int64_t limit,
                                       int64_t order) {
  std::vector<int64_t> joined;
  int64_t left = static_cast<int64_t>(dims.size());
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim, --left) {
    const bool stays_above = static_cast<int64_t>(joined.size()) + left > order;
    if (!joined.empty() && stays_above && joined.back() * *dim <= limit) {
      joined.back() *= *dim;
    } else {
      joined.push_back(*dim);
    }
  }
  return {joined.rbegin(), joined.rend()};
}

}  // namespace

int64_t BlockShape::count() const {
  return std::accumulate(counts.begin(), counts.end(), int64_t{1}, std::multiplies<>());
}

std::vector<int64_t> merged_dims(at::IntArrayRef shape, int64_t block_size, bool merge_dims,
                                 std::optional<int64_t> target_order) {
  std::vector<int64_t> dims = shape.vec();
  if (target_order == 0) {
    return dims;
  }
  if (merge_dims && !target_order && dims.size() == 4) {
    dims = {dims[0], dims[1] * dims[2] * dims[3]};
  }
  std::erase(dims, 1);
  if (merge_dims) {
    dims = joined_neighbours(dims, block_size, target_order.value_or(2));
  }
  if (dims.empty()) {
    dims.push_back(1);
  }
  return dims;
}

Blocking make_blocking(std::vector<int64_t> dims, int64_t block_size) {
  if (std::find(dims.begin(), dims.end(), 0) != dims.end()) {
    return {std::move(dims), {}};
  }
  Blocking blocking{std::move(dims), {BlockShape{}}};
  for (const int64_t length : blocking.dims) {
    std::vector<BlockShape> extended;
    for (const auto& shape : blocking.shapes) {
      for (const auto& segment : segments(length, block_size)) {
        BlockShape longer = shape;
        longer.sizes.push_back(segment.size);
        longer.counts.push_back(segment.count);
        longer.offsets.push_back(segment.offset);
        extended.push_back(std::move(longer));
      }
    }
    blocking.shapes = std::move(extended);
  }
  return blocking;
}

at::Tensor block_view(const at::Tensor& tensor, const Blocking& blocking, const BlockShape& shape) {
  const int64_t order = blocking.order();
  at::Tensor view = tensor.view(blocking.dims);
  std::vector<int64_t> sizes;
  std::vector<int64_t> permutation(2 * order);
  for (int64_t d = 0; d < order; ++d) {
    view = view.narrow(d, shape.offsets[d], shape.sizes[d] * shape.counts[d]);
    sizes.insert(sizes.end(), {shape.counts[d], shape.sizes[d]});
    permutation[d] = 2 * d;
    permutation[order + d] = 2 * d + 1;
  }
  // [c0 b0, c1 b1, ...] -> [c0, b0, c1, b1, ...] -> [c0, c1, ..., b0, b1, ...]
  return view.view(sizes).permute(permutation);
}

}  // namespace torchium::optim::detail
