#include "optim/core/failure_message.h"

#include "optim/core/found_inf_guard.h"
#include "optim/core/parameter_state.h"
#include "optim/core/step_status.h"

#include <ATen/ATen.h>

#include <cmath>
#include <iomanip>
#include <sstream>

namespace torchium::optim::detail {
namespace {

// The dtype that squares of the parameter's gradient are computed in, and how large that may be:
// " in float32 (above 8.4e+17)".
std::string limit_of(const at::Tensor& param, const at::Tensor& step) {
  if (!param.defined()) {
    return "";
  }
  const double t = step.defined() ? step.item<double>() + 1.0 : 1.0;
  const auto dtype = state_dtype(param);
  std::ostringstream text;
  text << " in " << (dtype == at::kDouble ? "float64" : "float32") << " (above "
       << std::setprecision(2) << largest_gradient(param.numel(), dtype) / std::sqrt(t) << ')';
  return text.str();
}

bool is_kfac_name(const std::string& optimizer) {
  return optimizer == "KFAC" || optimizer == "KFACPreconditioner";
}

// What else a step examines, besides the gradient.
std::string also_examined(const std::string& optimizer) {
  if (optimizer == "AdaHessian") {
    return " (or a diagonal of the Hessian)";
  }
  return is_kfac_name(optimizer) ? " (or an input or output gradient of its layer)" : "";
}

std::string skip_remedy(const std::string& optimizer) {
  const std::string remedy = "lower lr, clip gradients or scale the loss, as a GradScaler does";
  // A GradScaler raises its scale until gradients overflow, and sees no other tensor.
  return optimizer == "AdaHessian"
             ? remedy +
                   ", whose scale the diagonal bounds more than the gradients do: a larger "
                   "growth_interval keeps it from rising"
             : remedy;
}

std::string root_remedy(const std::string& optimizer) {
  if (optimizer == "NaturalGradient") {
    return "raise damping or lower lr";
  }
  const bool is_kfac = is_kfac_name(optimizer), is_shampoo = optimizer == "Shampoo";
  return c10::str("raise ", is_kfac ? "damping" : "eps", is_shampoo ? " or relative_eps" : "",
                  ", set ", is_kfac ? "solver" : "root_method",
                  " to 'eigh', or clip gradients so large that ",
                  is_kfac      ? "factors overflow"
                  : is_shampoo ? "statistics overflow"
                               : "their sum overflows");
}

}  // namespace

std::string failure_message(const std::string& optimizer, const Failure& failure,
                            int64_t max_root_failures) {
  if (failure.skips >= kMaxConsecutiveSkips) {
    return c10::str(failure.skips, " steps in a row had a gradient", also_examined(optimizer),
                    " that is not finite or too large to square",
                    limit_of(failure.non_finite, failure.step),
                    " and were skipped, the last one that of ", failure.non_finite_name, "; ",
                    skip_remedy(optimizer));
  }
  if (failure.root_failures >= max_root_failures) {
    return c10::str(optimizer == "NaturalGradient" ? "the natural gradient by "
                                                   : "the root of a preconditioner of ",
                    failure.failed_name, " failed ", failure.root_failures, " times in a row; ",
                    root_remedy(optimizer));
  }
  return "";
}

}  // namespace torchium::optim::detail
