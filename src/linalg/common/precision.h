// Precision of dtypes.
#pragma once

#include <c10/core/ScalarType.h>

namespace torchium::linalg::detail {

// 1 to the next larger number, for float64, float16 and bfloat16; for all others that of float32.
double epsilon_of(at::ScalarType dtype);

}  // namespace torchium::linalg::detail
