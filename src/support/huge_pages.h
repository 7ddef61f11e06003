#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::detail {

// at::empty, with a request for huge pages if large and on a CPU under Linux: the page faults of
// small pages cost more than filling the memory.
at::Tensor empty_in_huge_pages(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace torchium::detail
