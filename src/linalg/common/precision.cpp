#include "linalg/common/precision.h"

#include <limits>

namespace torchium::linalg::detail {

double epsilon_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kHalf:
      return static_cast<double>(std::numeric_limits<at::Half>::epsilon());
    case at::kBFloat16:
      return static_cast<double>(std::numeric_limits<at::BFloat16>::epsilon());
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

}  // namespace torchium::linalg::detail
