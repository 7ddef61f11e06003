#pragma once

#include <ATen/core/Tensor.h>

namespace torchium::detail {

// at::empty, whose memory the system is asked to back with huge pages if it is large and on a host
// with Linux: the first touch of memory in small pages costs more than to fill it.
at::Tensor empty_in_huge_pages(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace torchium::detail
