// Rectangles of elements of a tensor: [offset, offset + size) in every dimension.
#pragma once

#include "torchium/export.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace torchium::distributed {

struct TORCHIUM_API Rectangle {
  std::vector<int64_t> offsets, sizes;

  int64_t numel() const;
  bool contains(const Rectangle& other) const;
  friend bool operator==(const Rectangle&, const Rectangle&) = default;
};

// All elements of a tensor.
TORCHIUM_API Rectangle whole(const std::vector<int64_t>& shape);

// The elements of both; none: no element.
TORCHIUM_API std::optional<Rectangle> overlap(const Rectangle& a, const Rectangle& b);

}  // namespace torchium::distributed
