// Checks of state that comes from an archive.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace torchium::optim::detail {

// Throws c10::ValueError unless `value` has the shape and the kind (floating point or integer) of
// `needed`. `key` and `param` name it in the message.
void check_fits(const at::Tensor& value, const at::Tensor& needed, const std::string& key,
                const std::string& param);

// Throws c10::ValueError for state that no run can have: NaN and Inf, and negative counts and sums
// of squares. Waits for the device.
void check_numbers(const at::Tensor& value, const std::string& key, const std::string& param);

}  // namespace torchium::optim::detail
