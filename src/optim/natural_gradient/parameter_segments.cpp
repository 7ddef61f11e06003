#include "optim/natural_gradient/parameter_segments.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <c10/util/irange.h>

#include <algorithm>

namespace torchium::optim::detail {
namespace {

// Above it a copy on the CPU costs more than another operation.
constexpr int64_t kFewElements = int64_t{1} << 12;

bool is_joined(const at::Tensor& param) { return !param.is_cpu() || param.numel() <= kFewElements; }

}  // namespace

bool same_number(const at::Tensor& a, const at::Tensor& b) {
  return a.is_same(b) || (a.is_cpu() && b.is_cpu() && a.item<double>() == b.item<double>());
}

ParameterSegments::ParameterSegments(at::TensorList params, const NaturalGradientHyperparameters& h,
                                     const std::vector<double>& roundings) {
  const auto belong_together = [&](size_t a, size_t b) {
    return params[a].scalar_type() == params[b].scalar_type() && h.dampings[a] == h.dampings[b] &&
           h.momentums[a] == h.momentums[b] && h.maximize[a] == h.maximize[b] &&
           roundings[a] == roundings[b] && same_number(h.lrs[a], h.lrs[b]);
  };
  std::vector<size_t> open;  // segments that others may join
  for (const auto p : c10::irange(params.size())) {
    shapes_.push_back(params[p].sizes().vec());
    const auto found = std::ranges::find_if(
        open, [&](size_t segment) { return belong_together(members_[segment].front(), p); });
    if (is_joined(params[p]) && found != open.end()) {
      members_[*found].push_back(p);
      continue;
    }
    if (is_joined(params[p])) {
      open.push_back(members_.size());
    }
    members_.push_back({p});
  }
}

std::vector<double> ParameterSegments::of_params(at::ArrayRef<double> of_segments) const {
  std::vector<double> result(of_segments.empty() ? 0 : shapes_.size());
  for (const auto s : c10::irange(of_segments.size())) {
    for (const size_t p : members_[s]) {
      result[p] = of_segments[s];
    }
  }
  return result;
}

ParameterVector ParameterSegments::join(at::TensorList of_params) const {
  ParameterVector result;
  for (const auto& segment : members_) {
    if (segment.size() == 1) {
      result.push_back(of_params[segment.front()]);
      continue;
    }
    std::vector<at::Tensor> flat;
    for (const size_t p : segment) {
      flat.push_back(of_params[p].reshape(-1));
    }
    result.push_back(at::cat(flat));
  }
  return result;
}

std::vector<at::Tensor> ParameterSegments::split(const at::Tensor& vector, size_t segment) const {
  if (members_[segment].size() == 1) {
    return {vector};
  }
  std::vector<at::Tensor> result;
  int64_t first = 0;
  for (const size_t p : members_[segment]) {
    const int64_t count = c10::multiply_integers(shapes_[p]);
    result.push_back(vector.narrow(0, first, count).view(shapes_[p]));
    first += count;
  }
  return result;
}

std::vector<at::Tensor> ParameterSegments::split(const ParameterVector& vector) const {
  std::vector<at::Tensor> result(shapes_.size());
  for (const auto s : c10::irange(members_.size())) {
    const auto parts = split(vector[s], s);
    for (const auto k : c10::irange(parts.size())) {
      result[members_[s][k]] = parts[k];
    }
  }
  return result;
}

int64_t ParameterSegments::elements() const {
  int64_t count = 0;
  for (const auto& shape : shapes_) {
    count += c10::multiply_integers(shape);
  }
  return count;
}

at::Tensor ParameterSegments::flatten(const ParameterVector& vector, at::ScalarType dtype) const {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& of_param : split(vector)) {
    flat.push_back(of_param.reshape(-1).to(dtype));
  }
  return at::cat(flat);
}

ParameterVector ParameterSegments::unflatten(const at::Tensor& flat,
                                             const ParameterVector& like) const {
  std::vector<at::Tensor> of_params;
  int64_t first = 0;
  for (const at::Tensor& each : split(like)) {
    of_params.push_back(
        flat.narrow(0, first, each.numel()).view(each.sizes()).to(each.scalar_type()));
    first += each.numel();
  }
  return join(of_params);
}

}  // namespace torchium::optim::detail
