#include "optim/core/state_checks.h"

#include <ATen/ATen.h>

#include <set>

namespace torchium::optim::detail {
namespace {

const std::set<std::string> kNonNegative = {"step",
                                            "exp_avg_start",
                                            "grafting_second_moment_start",
                                            "factor_updates",
                                            "grafting_second_moment",
                                            "diagonal",
                                            "sum"};

}  // namespace

void check_fits(const at::Tensor& value, const at::Tensor& needed, const std::string& key,
                const std::string& param) {
  TORCH_CHECK_VALUE(value.sizes() == needed.sizes(), key, " of ", param, " has shape ",
                    value.sizes(), ", but the optimizer needs ", needed.sizes());
  const auto dtype = value.scalar_type();
  TORCH_CHECK_VALUE(at::isFloatingType(dtype) == at::isFloatingType(needed.scalar_type()) &&
                        !at::isComplexType(dtype),
                    key, " of ", param, " has dtype ", dtype, ", but the optimizer needs ",
                    needed.scalar_type());
}

void check_numbers(const at::Tensor& value, const std::string& key, const std::string& param) {
  TORCH_CHECK_VALUE(value.isfinite().all().item<bool>(), key, " of ", param,
                    " in the archive has entries that are not finite");
  TORCH_CHECK_VALUE(kNonNegative.count(key) == 0 || value.ge(0).all().item<bool>(), key, " of ",
                    param, " in the archive has entries below 0");
}

}  // namespace torchium::optim::detail
