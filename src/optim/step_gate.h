// Skips the whole step of a group when a gradient is not finite, without asking the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::optim::detail {

// A number of this step that the host knows, or that only the device knows.
struct StepScalar {
  double host = 1.0;
  at::Tensor device;  // 0-dim; defined where the host does not know the number

  at::Tensor divide(const at::Tensor& value) const;    // value / this
  at::Tensor multiply(const at::Tensor& value) const;  // value * this
};

// A tensor that a step uses beside its gradients, and the gradient it counts with.
struct Companion {
  at::Tensor tensor;
  size_t gradient;
};

// On the CPU a step that must be skipped returns early. On a device every change passes through the
// gate, which leaves the old value where `keep` is false.
class StepGate {
 public:
  // Looks for NaN and Inf in `grads` and their companions and writes what it found to `status`
  // (step_status.h).
  // found_inf: a GradScaler's verdict, one number, undefined without one. Where it is not zero the
  // step is skipped because of the loss scale, which the scaler lowers: it counts in the total
  // alone.
  static StepGate check(at::TensorList grads, at::Tensor& status, const at::Tensor& found_inf = {},
                        const std::vector<Companion>& companions = {});
  // A gate that `keep`, 0-dim bool on a device, closes.
  static StepGate of(at::Tensor keep);
  // A gate that is open: for updates that no gradient decides.
  static StepGate open() { return StepGate(); }

  // This gate, closed also where `accepted` (0-dim bool) is false.
  StepGate narrowed(const at::Tensor& accepted) const;

  bool skipped_on_host() const { return skipped_on_host_; }

  // `value` where the step is kept, zero where it is skipped (removes NaN and Inf).
  at::Tensor zero_if_skipped(const at::Tensor& value) const;
  // lr as a scale of updates: zero where the step is skipped.
  StepScalar learning_rate(const at::Tensor& lr) const;
  // t <- t + 1
  void advance(at::TensorList steps) const;
  // target <- value
  void assign_(at::Tensor& target, const at::Tensor& value) const;
  // target <- target + weight (value - target)
  void lerp_(at::Tensor& target, const at::Tensor& value, double weight) const;
  // matrices `accepted` [N] of a stack, less all of them where the step is skipped
  at::Tensor restrict(const at::Tensor& accepted) const;

  const at::Tensor& keep() const { return keep_; }

 private:
  bool skipped_on_host_ = false;
  at::Tensor keep_;  // 0-dim bool on the device; undefined: the host knows that the step is kept
};

// Whether a tensor on the CPU holds NaN or Inf.
bool has_nonfinite_on_cpu(const at::Tensor& tensor);

// target <- target - scale * value
void subtract_scaled_(at::Tensor& target, const at::Tensor& value, const StepScalar& scale);

// target <- (1 - weight_decay * scale) * target
void decay_(at::Tensor& target, double weight_decay, const StepScalar& scale);

}  // namespace torchium::optim::detail
