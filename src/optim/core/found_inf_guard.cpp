#include "optim/core/found_inf_guard.h"

#include "optim/core/parameter_state.h"
#include "optim/core/step_status.h"

#ifdef TORCHIUM_WITH_CUDA
#include "optim/core/cuda/device_check.h"
#endif

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

namespace torchium::optim::detail {
namespace {

constexpr int64_t kElementsPerTask = int64_t{1} << 17;
// Above the sum of 1/t over the first 2^45 steps.
constexpr double kSumOverSteps = 32.0;

// Magnitudes have the order of their bits, with NaN above Inf. Comparisons of integers vectorise,
// those of floats do not.
template <typename T, typename Bits>
bool any_above(const at::Tensor& dense, double largest) {
  const auto most = static_cast<double>(std::numeric_limits<T>::max());
  const auto bound = static_cast<T>(std::min(largest, most));
  Bits limit;
  static_assert(sizeof(limit) == sizeof(bound));
  std::memcpy(&limit, &bound, sizeof(limit));
  const auto* bits = static_cast<const Bits*>(dense.const_data_ptr());
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max();
  std::atomic<bool> found{false};
  at::parallel_for(0, dense.numel(), kElementsPerTask, [&](int64_t begin, int64_t end) {
    Bits any = 0;
    for (int64_t i = begin; i < end; ++i) {
      any |= static_cast<Bits>((bits[i] & kMagnitude) > limit);
    }
    if (any != 0) {
      found.store(true, std::memory_order_relaxed);
    }
  });
  return found.load();
}

// Whether a tensor on the CPU holds NaN or a magnitude above `largest`.
bool exceeds_on_cpu(const at::Tensor& tensor, double largest) {
  const at::Tensor dense = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
  switch (dense.scalar_type()) {
    case at::kFloat:
      return any_above<float, int32_t>(dense, largest);
    case at::kDouble:
      return any_above<double, int64_t>(dense, largest);
    case at::kBFloat16:
      return any_above<at::BFloat16, int16_t>(dense, largest);
    case at::kHalf:
      return any_above<at::Half, int16_t>(dense, largest);
    default:
      return !dense.to(at::kDouble).abs().le(largest).all().item<bool>();
  }
}

// Index of the first parameter with an entry that is not finite or too large; -1: none.
int64_t first_unfit(const std::vector<Examined>& all) {
  int64_t first = -1;
  for (const auto& [tensor, param, largest, steps] : all) {
    const auto index = static_cast<int64_t>(param);
    const double t = steps.defined() ? count_on_cpu(steps) + 1.0 : 1.0;
    if ((first < 0 || index < first) && exceeds_on_cpu(tensor, largest / std::sqrt(t))) {
      first = index;
    }
  }
  return first;
}

bool record_skip_on_cpu(const std::vector<Examined>& examined, at::Tensor& status,
                        const at::Tensor& found_inf) {
  auto* entries = status.mutable_data_ptr<int64_t>();
  status.unsafeGetTensorImpl()->bump_version();
  entries[kNonFiniteParameter] = -1;
  if (found_inf.defined() && found_inf.item<double>() != 0.0) {
    ++entries[kTotalSkips];
    return true;
  }
  entries[kNonFiniteParameter] = first_unfit(examined);
  if (entries[kNonFiniteParameter] < 0) {
    entries[kConsecutiveSkips] = 0;
    return false;
  }
  ++entries[kConsecutiveSkips];
  ++entries[kTotalSkips];
  return true;
}

#ifndef TORCHIUM_WITH_CUDA
// The largest magnitude of each tensor divided by its limit at t = 1: 0-dim float64; NaN for NaN.
std::vector<at::Tensor> shares_of_largest(const std::vector<Examined>& all) {
  std::map<at::ScalarType, std::vector<size_t>> by_dtype;  // _foreach_norm takes one
  for (size_t i = 0; i < all.size(); ++i) {
    by_dtype[all[i].tensor.scalar_type()].push_back(i);
  }
  std::vector<at::Tensor> shares(all.size());
  for (const auto& [dtype, indices] : by_dtype) {
    std::vector<at::Tensor> nonempty;
    std::vector<at::Scalar> largest;
    for (const size_t i : indices) {
      const at::Tensor& tensor = all[i].tensor;
      nonempty.push_back(tensor.numel() > 0 ? tensor : at::zeros({1}, tensor.options()));
      largest.emplace_back(all[i].largest);
    }
    const auto norms = at::_foreach_norm(nonempty, std::numeric_limits<double>::infinity());
    auto of_dtype = at::stack(norms).to(at::kDouble).unbind();
    at::_foreach_div_(of_dtype, largest);
    for (size_t k = 0; k < indices.size(); ++k) {
      shares[indices[k]] = of_dtype[k];
    }
  }
  return shares;
}

// The same on a device, without reading the result.
at::Tensor record_skip_on_device(const std::vector<Examined>& examined, at::Tensor& status,
                                 const at::Tensor& found_inf) {
  std::vector<at::Tensor> steps;
  const at::Tensor none = at::zeros({}, status.options().dtype(at::kDouble));
  for (const Examined& each : examined) {
    steps.push_back(each.steps.defined() ? each.steps : none);
  }
  const at::Tensor t = at::stack(steps).add_(1.0);
  const auto fits = at::stack(shares_of_largest(examined)).mul_(t.sqrt_()).le(1.0).unbind();
  std::map<size_t, at::Tensor> of_params;  // in order
  for (size_t i = 0; i < examined.size(); ++i) {
    at::Tensor& of_param = of_params[examined[i].param];
    of_param = of_param.defined() ? of_param.logical_and(fits[i]) : fits[i];
  }
  std::vector<at::Tensor> in_order;
  std::vector<int64_t> params;
  for (const auto& [param, fit] : of_params) {
    in_order.push_back(fit);
    params.push_back(static_cast<int64_t>(param));
  }
  const at::Tensor unfit = at::stack(in_order).logical_not_();
  const at::Tensor first = at::tensor(params, status.options()).take(unfit.to(at::kInt).argmax());
  at::Tensor skipped = unfit.any();
  at::Tensor at_fault = at::where(skipped, first, -1);
  at::Tensor consecutive = status.select(0, kConsecutiveSkips);
  at::Tensor in_a_row = (consecutive + 1) * skipped;
  if (found_inf.defined()) {
    const at::Tensor overflow = found_inf.to(status.device()).ne(0).view(at::IntArrayRef{});
    skipped = skipped.logical_or(overflow);
    at_fault = at::where(overflow, -1, at_fault);
    in_a_row = at::where(overflow, consecutive, in_a_row);
  }
  consecutive.copy_(in_a_row);
  status.select(0, kTotalSkips).add_(skipped);
  status.select(0, kNonFiniteParameter).copy_(at_fault);
  return skipped.logical_not();
}
#endif

}  // namespace

double largest_gradient(int64_t numel, at::ScalarType dtype) {
  return std::sqrt(largest_number(dtype) /
                   (kSumOverSteps * static_cast<double>(std::max<int64_t>(numel, 1))));
}

GradientLimits gradient_limits(const at::Tensor& param, double weight_decay) {
  const double largest = largest_gradient(param.numel(), state_dtype(param));
  if (weight_decay == 0.0) {
    return {largest};
  }
  return {largest / 2, true, largest / 2 / weight_decay};
}

std::vector<Examined> examined_gradients(at::TensorList params, at::TensorList grads,
                                         const std::vector<at::Tensor>& steps,
                                         const std::vector<double>& weight_decays) {
  std::vector<Examined> examined;
  examined.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const GradientLimits limits = gradient_limits(params[i], weight_decays[i]);
    examined.push_back({grads[i], i, limits.gradient, steps[i]});
    if (limits.has_parameter) {
      examined.push_back({params[i], i, limits.parameter, steps[i]});
    }
  }
  return examined;
}

at::Tensor StepScalar::divide(const at::Tensor& value) const {
  if (device.defined()) {
    return value / device.to(value.scalar_type());  // two 0-dim tensors would promote to float64
  }
  return host == 1.0 ? value : value / host;
}

at::Tensor StepScalar::multiply(const at::Tensor& value) const {
  if (device.defined()) {
    return value * device.to(value.scalar_type());
  }
  return host == 1.0 ? value : value * host;
}

FoundInfGuard FoundInfGuard::check(const std::vector<Examined>& examined, at::Tensor& status,
                                   const at::Tensor& found_inf) {
  FoundInfGuard guard;
  if (status.is_cpu()) {
    guard.skipped_on_host_ = record_skip_on_cpu(examined, status, found_inf);
  } else {
#ifdef TORCHIUM_WITH_CUDA
    guard.keep_ = record_skip_by_kernels(examined, status, found_inf);
#else
    guard.keep_ = record_skip_on_device(examined, status, found_inf);
#endif
  }
  return guard;
}

FoundInfGuard FoundInfGuard::of(at::Tensor keep) {
  FoundInfGuard guard;
  guard.keep_ = std::move(keep);
  return guard;
}

FoundInfGuard FoundInfGuard::narrowed(const at::Tensor& accepted) const {
  FoundInfGuard guard = *this;
  if (accepted.is_cpu()) {
    guard.skipped_on_host_ |= !accepted.item<bool>();
  } else {
    guard.keep_ = restrict(accepted);
  }
  return guard;
}

at::Tensor FoundInfGuard::zero_if_skipped(const at::Tensor& value) const {
  return keep_.defined() ? at::where(keep_, value, at::Scalar(0)) : value;
}

StepScalar FoundInfGuard::learning_rate(const at::Tensor& lr) const {
  if (keep_.defined()) {
    return {0.0, lr.is_cpu() ? keep_.to(at::kDouble).mul_(lr.item<double>()) : keep_ * lr};
  }
  return lr.is_cpu() ? StepScalar{lr.item<double>(), {}} : StepScalar{0.0, lr};
}

void FoundInfGuard::advance(at::TensorList steps) const {
  if (keep_.defined()) {
    at::_foreach_add_(steps, keep_.to(at::kDouble));
    return;
  }
  for (const at::Tensor& step : steps) {
    if (step.is_cpu()) {
      ++*step.mutable_data_ptr<double>();
      step.unsafeGetTensorImpl()->bump_version();
    } else {
      step.add_(1);
    }
  }
}

void FoundInfGuard::assign_(at::Tensor& target, const at::Tensor& value) const {
  target.copy_(keep_.defined() ? at::where(keep_, value, target) : value);
}

void FoundInfGuard::lerp_(at::Tensor& target, const at::Tensor& value, double weight) const {
  if (keep_.defined()) {
    target.lerp_(value, keep_.to(target.scalar_type()).mul_(weight));
  } else {
    target.lerp_(value, weight);
  }
}

at::Tensor FoundInfGuard::restrict(const at::Tensor& accepted) const {
  return keep_.defined() ? accepted.logical_and(keep_) : accepted;
}

double count_on_cpu(const at::Tensor& step) { return *step.const_data_ptr<double>(); }

double largest_number(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return std::numeric_limits<double>::max();
    case at::kBFloat16:
      return std::numeric_limits<at::BFloat16>::max();
    case at::kHalf:
      return std::numeric_limits<at::Half>::max();
    default:
      return std::numeric_limits<float>::max();
  }
}

at::Tensor finite_entries(const at::Tensor& value) { return value.nan_to_num(0.0, 0.0, 0.0); }

void subtract_scaled_(at::Tensor& target, const at::Tensor& value, const StepScalar& scale) {
  if (scale.device.defined()) {
    target.sub_(value * scale.device);
  } else {
    target.add_(value, -scale.host);
  }
  const double most = largest_number(target.scalar_type());
  target.clamp_(-most, most);
}

void decay_(at::Tensor& target, double weight_decay, const StepScalar& scale) {
  if (scale.device.defined()) {
    target.mul_(1.0 - scale.device * weight_decay);
  } else {
    target.mul_(1.0 - scale.host * weight_decay);
  }
}

}  // namespace torchium::optim::detail
