// Skips the whole step of a group when a gradient is not finite or too large to square, without
// asking the device.
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

// A tensor that a step looks at before it changes anything.
struct Examined {
  at::Tensor tensor;
  size_t param;      // index in the step of the parameter it counts with
  double largest;    // magnitude that the step can still work with
  at::Tensor steps;  // t - 1 of the parameter: divides `largest` by sqrt(t); undefined: t = 1
};

// The largest entry at t = 1 of a gradient of `numel` elements, in steps with state of `dtype`:
// sqrt(largest number / (32 numel)). Sums of squares over all elements and over the first 2^45
// steps are finite then, since sum 1/t < 32, and so are norms, moments and statistics.
double largest_gradient(int64_t numel, at::ScalarType dtype);

// The same with an L2 penalty: half of the limit is left to the gradient, half to weight_decay
// times the parameter.
struct GradientLimits {
  double gradient;
  bool has_parameter = false;  // without a penalty the parameter has no limit
  double parameter = 0.0;
};
GradientLimits gradient_limits(const at::Tensor& param, double weight_decay);

// The gradients; with L2 weight decay their parameters too. `weight_decays`: one a parameter.
std::vector<Examined> examined_gradients(at::TensorList params, at::TensorList grads,
                                         const std::vector<at::Tensor>& steps,
                                         const std::vector<double>& weight_decays);

// On the CPU a step that must be skipped returns early. On a device every change passes through the
// guard, which leaves the old value where `keep` is false.
class FoundInfGuard {
 public:
  // Looks for entries that are not finite or too large, and writes what it found to `status`
  // (step_status.h).
  // found_inf: a GradScaler's verdict, one number, undefined without one. Where it is not zero the
  // step is skipped because of the loss scale, which the scaler lowers: it counts in the total
  // alone.
  static FoundInfGuard check(const std::vector<Examined>& examined, at::Tensor& status,
                             const at::Tensor& found_inf = {});
  // A guard that `keep`, 0-dim bool on a device, closes.
  static FoundInfGuard of(at::Tensor keep);
  // A guard that is open: for updates that no gradient decides.
  static FoundInfGuard open() { return FoundInfGuard(); }

  // This guard, closed also where `accepted` (0-dim bool) is false.
  FoundInfGuard narrowed(const at::Tensor& accepted) const;

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
  // matrices `accepted` [N] of a buffer, less all of them where the step is skipped
  at::Tensor restrict(const at::Tensor& accepted) const;

  const at::Tensor& keep() const { return keep_; }

 private:
  bool skipped_on_host_ = false;
  at::Tensor keep_;  // 0-dim bool on the device; undefined: the host knows that the step is kept
};

// A count of steps, float64, on the CPU.
double count_on_cpu(const at::Tensor& step);

double largest_number(at::ScalarType dtype);

// `value` with zeros for NaN and Inf.
at::Tensor finite_entries(const at::Tensor& value);

// target <- target - scale * value, within the numbers of its dtype.
void subtract_scaled_(at::Tensor& target, const at::Tensor& value, const StepScalar& scale);

// target <- (1 - weight_decay * scale) * target
void decay_(at::Tensor& target, double weight_decay, const StepScalar& scale);

}  // namespace torchium::optim::detail
