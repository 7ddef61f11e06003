// Parameters whose parts of a vector lie one after the other, so that operations on it are few.
#pragma once

#include "optim/natural_gradient/natural_gradient_step.h"
#include "optim/natural_gradient/parameter_vectors.h"
#include "optim/natural_gradient/sharing/shared_jacobian.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::optim::detail {

// Whether it is known without a wait that both are equal.
bool same_number(const at::Tensor& a, const at::Tensor& b);

// A segment has parameters with the same options, dtype and rounding. On a GPU, where a
// launch costs more than a copy, it has all of them; on a CPU those of a few elements. A segment of
// one parameter is a tensor of its shape, any other one is flat.
class ParameterSegments {
 public:
  // roundings: gradient_rounding.h.
  ParameterSegments(at::TensorList params, const NaturalGradientHyperparameters& hyperparameters,
                    const std::vector<double>& roundings);

  // The parameters of each segment.
  const std::vector<std::vector<size_t>>& members() const { return members_; }

  // The common values of the parameters of each segment.
  template <typename T>
  std::vector<T> common(const std::vector<T>& of_params) const {
    std::vector<T> result;
    for (const auto& segment : members_) {
      result.push_back(of_params[segment.front()]);
    }
    return result;
  }
  // The same number for all parameters of a segment.
  std::vector<double> of_params(at::ArrayRef<double> of_segments) const;

  // One tensor per parameter -> one per segment.
  ParameterVector join(at::TensorList of_params) const;
  // Views in the shapes of the parameters.
  std::vector<at::Tensor> split(const ParameterVector& vector) const;
  std::vector<at::Tensor> split(const at::Tensor& vector, size_t segment) const;

  // All parameters one after the other: [elements].
  int64_t elements() const;
  at::Tensor flatten(const ParameterVector& vector, at::ScalarType dtype) const;
  // The inverse, in the dtypes of `like`.
  ParameterVector unflatten(const at::Tensor& flat, const ParameterVector& like) const;

 private:
  std::vector<std::vector<size_t>> members_;
  std::vector<std::vector<int64_t>> shapes_;  // of the parameters
};

// J with vectors in segments.
struct SegmentedJacobian {
  const SharedJacobian& J;
  const ParameterSegments& segments;

  int64_t samples() const { return J.samples(); }
  bool any(bool own) const { return J.any(own); }
  void equalize_(const std::vector<at::Tensor>& results) const { J.equalize_(results); }
  at::Tensor product(const ParameterVector& x, at::ArrayRef<double> scales = {}) const {
    return J.product(segments.split(x), segments.of_params(scales));
  }
  ParameterVector transpose_product(const at::Tensor& w, at::ArrayRef<double> scales = {}) const {
    return segments.join(J.transpose_product(w, segments.of_params(scales)));
  }
};

}  // namespace torchium::optim::detail
