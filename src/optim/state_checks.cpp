#include "optim/state_checks.h"

namespace torchium::optim::detail {

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

}  // namespace torchium::optim::detail
