#include "distributed/rectangle.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace torchium::distributed {

int64_t Rectangle::numel() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

bool Rectangle::contains(const Rectangle& other) const { return overlap(*this, other) == other; }

Rectangle whole(const std::vector<int64_t>& shape) {
  return {std::vector<int64_t>(shape.size(), 0), shape};
}

std::optional<Rectangle> overlap(const Rectangle& a, const Rectangle& b) {
  Rectangle both;
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    const int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (begin >= end) {
      return std::nullopt;
    }
    both.offsets.push_back(begin);
    both.sizes.push_back(end - begin);
  }
  return both;
}

}  // namespace torchium::distributed
