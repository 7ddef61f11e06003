// Where parts of a buffer begin.
#pragma once

#include <cstdint>

namespace torchium::distributed {

// The next multiple of 16 elements: every part begins where kernels and BLAS read fastest.
inline int64_t aligned(int64_t elements) { return (elements + 15) / 16 * 16; }

}  // namespace torchium::distributed
