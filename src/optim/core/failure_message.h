// The errors of an optimizer for skipped steps and failed roots.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace torchium::optim::detail {

struct Failure {
  int64_t skips;                // steps in a row
  at::Tensor non_finite;        // the parameter that skipped the last of them; undefined: unknown
  at::Tensor step;              // steps that it has taken; undefined: none
  std::string non_finite_name;  // as messages call it
  int64_t root_failures;        // in a row, of one matrix
  std::string failed_name;      // the parameter of that matrix
};

// The message; empty: nothing is to be raised yet. `optimizer`: "Shampoo", "Adagrad", "KFAC" or
// "NaturalGradient". Otherwise it waits for the device.
std::string failure_message(const std::string& optimizer, const Failure& failure,
                            int64_t max_root_failures);

}  // namespace torchium::optim::detail
