#include "optim/step_gate.h"

#include "optim/step_status.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <type_traits>
#include <utility>

namespace torchium::optim::detail {
namespace {

constexpr int64_t kElementsPerTask = int64_t{1} << 17;

// NaN and Inf have all exponent bits set; integer compares vectorise where isfinite() does not.
template <typename Bits>
bool any_exponent_full(const void* data, int64_t count, Bits exponent) {
  const auto* bits = static_cast<const Bits*>(data);
  std::atomic<bool> found{false};
  at::parallel_for(0, count, kElementsPerTask, [&](int64_t begin, int64_t end) {
    Bits any = 0;
    for (int64_t i = begin; i < end; ++i) {
      any |= static_cast<Bits>((bits[i] & exponent) == exponent);
    }
    if (any != 0) {
      found.store(true, std::memory_order_relaxed);
    }
  });
  return found.load();
}

// Index of the first gradient that is not finite or has such a companion; -1: none.
int64_t first_nonfinite(at::TensorList grads, const std::vector<Companion>& companions) {
  const auto found = std::find_if(grads.begin(), grads.end(), has_nonfinite_on_cpu);
  int64_t first = found == grads.end() ? -1 : found - grads.begin();
  for (const auto& [tensor, gradient] : companions) {
    const auto index = static_cast<int64_t>(gradient);
    if ((first < 0 || index < first) && has_nonfinite_on_cpu(tensor)) {
      first = index;
    }
  }
  return first;
}

bool record_skip_on_cpu(at::TensorList grads, at::Tensor& status, const at::Tensor& found_inf,
                        const std::vector<Companion>& companions) {
  auto* entries = status.mutable_data_ptr<int64_t>();
  status.unsafeGetTensorImpl()->bump_version();
  entries[kNonFiniteParameter] = -1;
  if (found_inf.defined() && found_inf.item<double>() != 0.0) {
    ++entries[kTotalSkips];
    return true;
  }
  entries[kNonFiniteParameter] = first_nonfinite(grads, companions);
  if (entries[kNonFiniteParameter] < 0) {
    entries[kConsecutiveSkips] = 0;
    return false;
  }
  ++entries[kConsecutiveSkips];
  ++entries[kTotalSkips];
  return true;
}

// isfinite of every tensor as a whole, 0-dim.
std::vector<at::Tensor> are_finite(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> nonempty;
  for (const auto& tensor : tensors) {
    nonempty.push_back(tensor.numel() > 0 ? tensor : at::zeros({1}, tensor.options()));
  }
  std::vector<at::Tensor> finite;
  if (!nonempty.empty()) {
    finite = at::_foreach_norm(nonempty, std::numeric_limits<double>::infinity());
  }
  for (auto& norm : finite) {
    norm = at::isfinite(norm);
  }
  return finite;
}

// The same on a device, without a look at the result.
at::Tensor record_skip_on_device(at::TensorList grads, at::Tensor& status,
                                 const at::Tensor& found_inf,
                                 const std::vector<Companion>& companions) {
  std::vector<at::Tensor> finite = are_finite(grads.vec());
  std::vector<at::Tensor> beside;
  for (const auto& companion : companions) {
    beside.push_back(companion.tensor);
  }
  // A call of its own: tensors of two dtypes are not worked on together.
  beside = are_finite(beside);
  for (size_t i = 0; i < companions.size(); ++i) {
    at::Tensor& of_gradient = finite[companions[i].gradient];
    of_gradient = of_gradient.logical_and(beside[i]);
  }
  const at::Tensor nonfinite = at::stack(finite).logical_not_();
  const at::Tensor first = nonfinite.to(at::kInt).argmax();
  at::Tensor skipped = nonfinite.any();
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

}  // namespace

bool has_nonfinite_on_cpu(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
  const void* data = dense.const_data_ptr();
  const int64_t count = dense.numel();
  switch (dense.scalar_type()) {
    case at::kFloat:
      return any_exponent_full<uint32_t>(data, count, 0x7f800000u);
    case at::kDouble:
      return any_exponent_full<uint64_t>(data, count, 0x7ff0000000000000ull);
    case at::kBFloat16:
      return any_exponent_full<uint16_t>(data, count, 0x7f80u);
    case at::kHalf:
      return any_exponent_full<uint16_t>(data, count, 0x7c00u);
    default:
      return !at::isfinite(dense).all().item<bool>();
  }
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

StepGate StepGate::check(at::TensorList grads, at::Tensor& status, const at::Tensor& found_inf,
                         const std::vector<Companion>& companions) {
  StepGate gate;
  if (grads.empty()) {
    return gate;
  }
  if (grads[0].is_cpu()) {
    gate.skipped_on_host_ = record_skip_on_cpu(grads, status, found_inf, companions);
  } else {
    gate.keep_ = record_skip_on_device(grads, status, found_inf, companions);
  }
  return gate;
}

StepGate StepGate::of(at::Tensor keep) {
  StepGate gate;
  gate.keep_ = std::move(keep);
  return gate;
}

StepGate StepGate::narrowed(const at::Tensor& accepted) const {
  StepGate gate = *this;
  if (accepted.is_cpu()) {
    gate.skipped_on_host_ |= !accepted.item<bool>();
  } else {
    gate.keep_ = restrict(accepted);
  }
  return gate;
}

at::Tensor StepGate::zero_if_skipped(const at::Tensor& value) const {
  return keep_.defined() ? at::where(keep_, value, at::zeros({}, value.options())) : value;
}

StepScalar StepGate::learning_rate(const at::Tensor& lr) const {
  if (keep_.defined()) {
    return {0.0, lr.is_cpu() ? keep_.to(at::kDouble).mul_(lr.item<double>()) : keep_ * lr};
  }
  return lr.is_cpu() ? StepScalar{lr.item<double>(), {}} : StepScalar{0.0, lr};
}

void StepGate::advance(at::TensorList steps) const {
  for (const at::Tensor& step : steps) {
    if (keep_.defined()) {
      step.add_(keep_);
    } else {
      step.add_(1);
    }
  }
}

void StepGate::assign_(at::Tensor& target, const at::Tensor& value) const {
  target.copy_(keep_.defined() ? at::where(keep_, value, target) : value);
}

void StepGate::lerp_(at::Tensor& target, const at::Tensor& value, double weight) const {
  if (keep_.defined()) {
    target.lerp_(value, keep_.to(target.scalar_type()).mul_(weight));
  } else {
    target.lerp_(value, weight);
  }
}

at::Tensor StepGate::restrict(const at::Tensor& accepted) const {
  return keep_.defined() ? accepted.logical_and(keep_) : accepted;
}

void subtract_scaled_(at::Tensor& target, const at::Tensor& value, const StepScalar& scale) {
  if (scale.device.defined()) {
    target.sub_(value * scale.device);
  } else {
    target.add_(value, -scale.host);
  }
}

void decay_(at::Tensor& target, double weight_decay, const StepScalar& scale) {
  if (scale.device.defined()) {
    target.mul_(1.0 - scale.device * weight_decay);
  } else {
    target.mul_(1.0 - scale.host * weight_decay);
  }
}

}  // namespace torchium::optim::detail
