// Skips the whole step of a group if a gradient is not finite or too large to square, without
// waiting for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::optim::detail {

// A number of this step, on the host or on the device.
struct StepScalar {
  double host = 1.0;
  at::Tensor device;  // 0-dim; undefined: the number is `host`

  at::Tensor divide(const at::Tensor& value) const;    // value / this
  at::Tensor multiply(const at::Tensor& value) const;  // value * this
};

// A tensor that a step examines before it changes anything.
struct Examined {
  at::Tensor tensor;
  size_t param;      // index in the step of its parameter
  double largest;    // largest magnitude at t = 1; divided by sqrt(t)
  at::Tensor steps;  // t - 1 of the parameter; undefined: 0
};

// sqrt(M / (32 numel)), the largest entry at t = 1 of a gradient of `numel` elements; M is the
// largest number of the state's dtype. Sums of squares over all elements and the first 2^45 steps
// are then finite, because the sum of 1/t is below 32, and so are norms, moments and statistics.
double largest_gradient(int64_t numel, at::ScalarType dtype);

// The same with an L2 penalty: half of the limit applies to the gradient, half to weight_decay
// times the parameter.
struct GradientLimits {
  double gradient;
  bool has_parameter = false;  // without a penalty the parameter has no limit
  double parameter = 0.0;
};
GradientLimits gradient_limits(const at::Tensor& param, double weight_decay);

// The gradients, and with an L2 penalty the parameters. `weight_decays`: one per parameter.
std::vector<Examined> examined_gradients(at::TensorList params, at::TensorList grads,
                                         const std::vector<at::Tensor>& steps,
                                         const std::vector<double>& weight_decays);

// On the CPU a skipped step returns early. On a device every change passes through the guard, which
// leaves the old value if `keep` is false.
class FoundInfGuard {
 public:
  // Looks for entries that are not finite or too large, and writes the result to `status`
  // (step_status.h). found_inf: of a GradScaler, one number; undefined: 0. If it is not 0 the step
  // is skipped because of the loss scale, which the scaler lowers; only the total counts it.
  static FoundInfGuard check(const std::vector<Examined>& examined, at::Tensor& status,
                             const at::Tensor& found_inf = {});
  // A guard that skips if `keep`, 0-dim bool on a device, is false.
  static FoundInfGuard of(at::Tensor keep);
  // A guard that never skips: for updates that depend on no gradient.
  static FoundInfGuard open() { return FoundInfGuard(); }

  // This guard, which also skips if `accepted` (0-dim bool) is false.
  FoundInfGuard narrowed(const at::Tensor& accepted) const;

  bool skipped_on_host() const { return skipped_on_host_; }

  // `value`; zero if the step is skipped, which removes NaN and Inf.
  at::Tensor zero_if_skipped(const at::Tensor& value) const;
  // lr; zero if the step is skipped.
  StepScalar learning_rate(const at::Tensor& lr) const;
  // t <- t + 1
  void advance(at::TensorList steps) const;
  // target <- value
  void assign_(at::Tensor& target, const at::Tensor& value) const;
  // target <- target + weight (value - target)
  void lerp_(at::Tensor& target, const at::Tensor& value, double weight) const;
  // `accepted` [N]; all false if the step is skipped
  at::Tensor restrict(const at::Tensor& accepted) const;

  const at::Tensor& keep() const { return keep_; }

 private:
  bool skipped_on_host_ = false;
  at::Tensor keep_;  // 0-dim bool on the device; undefined: kept
};

// A count of steps, float64, on the CPU.
double count_on_cpu(const at::Tensor& step);

double largest_number(at::ScalarType dtype);

// `value` with zeros for NaN and Inf.
at::Tensor finite_entries(const at::Tensor& value);

// target <- target - scale * value, saturated at the largest number of its dtype.
void subtract_scaled_(at::Tensor& target, const at::Tensor& value, const StepScalar& scale);

// target <- (1 - weight_decay * scale) * target
void decay_(at::Tensor& target, double weight_decay, const StepScalar& scale);

}  // namespace torchium::optim::detail
