// The Ritz pairs of a full basis, computed where it is: the host waits once, for five numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace torchium::linalg::detail {

// Whether device_ritz_pairs takes a basis of m vectors with these options, and `which`.
bool has_device_ritz_pairs(int64_t m, const std::string& which, const at::TensorOptions& options);

// Of a symmetric problem; see RitzPairs. In float64 on the device, from eigenvectors in float32.
struct DeviceRitzPairs {
  at::Tensor values;     // [k]
  at::Tensor vectors;    // [m, k], orthonormal
  at::Tensor residuals;  // [k]

  struct Quality {
    double largest;    // |theta| of all m
    double residual;   // the largest
    double norm;       // |H|
    double asymmetry;  // |H - H^T| / 2
  };
  Quality quality() const;  // waits

  at::Tensor numbers;  // of it
};

// projection: H [m, m] above B [b, m], finite or not.
DeviceRitzPairs device_ritz_pairs(const at::Tensor& projection, int64_t k,
                                  const std::string& which);

}  // namespace torchium::linalg::detail
