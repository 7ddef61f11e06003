#include "distributed/rectangle.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace torchium::distributed {
namespace {

using Segments = std::vector<std::pair<int64_t, int64_t>>;  // offset and size

// Indices (i, j), with i in `outer` and j in [offset, offset + size), as i length + j.
Segments merged(const Segments& outer, int64_t length, int64_t offset, int64_t size) {
  Segments result;
  for (const auto& [begin, count] : outer) {
    if (size == length) {
      result.emplace_back(begin * length, count * length);
      continue;
    }
    for (int64_t i = begin; i < begin + count; ++i) {
      result.emplace_back(i * length + offset, size);
    }
  }
  return result;
}

}  // namespace

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

std::vector<Rectangle> after_merging(const Rectangle& part, const std::vector<int64_t>& shape,
                                     const std::vector<int64_t>& dims) {
  if (part.numel() == 0) {
    return {};
  }
  std::vector<Rectangle> result{Rectangle{}};
  size_t d = 0;
  for (const int64_t length : dims) {
    Segments segments{{0, 1}};
    int64_t merged_length = 1;
    // Unit dimensions change nothing, so it does not matter where they go.
    for (; d < shape.size() && (merged_length < length || shape[d] == 1); ++d) {
      segments = merged(segments, shape[d], part.offsets[d], part.sizes[d]);
      merged_length *= shape[d];
    }
    std::vector<Rectangle> extended;
    for (const Rectangle& rectangle : result) {
      for (const auto& [offset, size] : segments) {
        extended.push_back(rectangle);
        extended.back().offsets.push_back(offset);
        extended.back().sizes.push_back(size);
      }
    }
    result = std::move(extended);
  }
  return result;
}

}  // namespace torchium::distributed
