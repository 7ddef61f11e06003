#include "optim/core/state_checks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>
#include <string_view>

namespace torchium::optim::detail {
namespace {

const std::set<std::string_view> kNonNegative = {
    "step",           "exp_avg_start",    "grafting_second_moment_start",
    "factor_updates", "moment_updates",   "grafting_second_moment",
    "diagonal",       "hessian_diagonal", "exp_hessian_diag_sq",
    "root_failures",  "use_samples",      "sum"};

bool is_dense_real(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return tensor.layout() == at::kStrided && !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
         (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 ||
          dtype == at::kHalf);
}

void check_dense_real(const at::Tensor& tensor, const std::string& name) {
  if (is_dense_real(tensor)) {
    return;
  }
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, name, " has layout ", tensor.layout(),
                    "; only dense tensors are supported, for example with sparse=False of "
                    "nn.Embedding");
  TORCH_CHECK_VALUE(!tensor.unsafeGetTensorImpl()->is_python_dispatch(), name,
                    " is a tensor subclass (for example a DTensor); only plain tensors are "
                    "supported");
  TORCH_CHECK_VALUE(false, name, " has dtype ", c10::getDtypeNames(tensor.scalar_type()).first,
                    "; only real floating-point tensors (float32, float64, bfloat16, float16) are "
                    "supported");
}

bool contains(const std::vector<std::string>& keys, const std::string& key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

// "['A', 'G']"
std::string listed(std::vector<std::string> keys) {
  std::sort(keys.begin(), keys.end());
  std::string text;
  for (const auto& key : keys) {
    text += (text.empty() ? "'" : ", '") + key + "'";
  }
  return "[" + text + "]";
}

void check_fits(const at::Tensor& value, const at::Tensor& needed, const std::string& key,
                const std::string& param) {
  const auto dtype = value.scalar_type();
  TORCH_CHECK_VALUE(value.layout() == at::kStrided, "'", key, "' of ", param,
                    " must be a dense tensor, got a ", value.layout(), " tensor of shape ",
                    value.sizes());
  TORCH_CHECK_VALUE(!value.is_meta(), "'", key, "' of ", param,
                    " is on the meta device in the checkpoint, where it has no values; load the "
                    "checkpoint with map_location='cpu'");
  const bool is_count = key == "step" && value.numel() == 1;
  TORCH_CHECK_VALUE(is_count || value.sizes() == needed.sizes(), "'", key, "' of ", param,
                    " has shape ", value.sizes(), " in the checkpoint, the optimizer needs ",
                    needed.sizes());
  TORCH_CHECK_VALUE(
      !at::isComplexType(dtype) &&
          at::isFloatingType(dtype) == at::isFloatingType(needed.scalar_type()),
      "'", key, "' of ", param, " has dtype ", dtype, " in the checkpoint, the optimizer needs ",
      at::isFloatingType(needed.scalar_type()) ? "a floating-point one" : "an integer one");
}

}  // namespace

std::string parameter_name(size_t group, size_t position, const std::string& name,
                           const at::Tensor& param) {
  const std::string label = name.empty() ? std::to_string(position) : "'" + name + "'";
  return c10::str("parameter ", label, " of group ", group, " (shape ", param.sizes(), ")");
}

void check_parameter(const at::Tensor& param, const std::string& name) {
  check_dense_real(param, name);
  for (int64_t d = 0; d < param.dim(); ++d) {
    TORCH_CHECK_VALUE(param.size(d) <= 1 || param.stride(d) != 0, name,
                      " is expanded: elements of it share memory (strides ", param.strides(),
                      "); optimize the tensor that it expands");
  }
}

bool fits(const at::Tensor& grad, const at::Tensor& param) {
  return is_dense_real(grad) && !param.is_meta() && grad.sizes() == param.sizes() &&
         grad.device() == param.device();
}

void check_gradient(const at::Tensor& grad, const at::Tensor& param, const std::string& name) {
  if (fits(grad, param)) {
    return;
  }
  TORCH_CHECK_VALUE(!param.is_meta(), name,
                    " is on the meta device, where it has no values; give "
                    "the model memory with to_empty(device=...) and initialize it before step()");
  check_dense_real(grad, "the gradient of " + name);
  TORCH_CHECK_VALUE(false, "the gradient of ", name, " has shape ", grad.sizes(), " on ",
                    grad.device(), "; it must have the shape and the device of the parameter");
}

void check_numbers(const at::Tensor& value, const std::string& key, const std::string& param) {
  TORCH_CHECK_VALUE(value.isfinite().all().item<bool>(), "'", key, "' of ", param,
                    " in the checkpoint has entries that are not finite");
  const bool may_be_negative = kNonNegative.count(key.substr(0, key.find('.'))) == 0;
  TORCH_CHECK_VALUE(may_be_negative || value.ge(0).all().item<bool>(), "'", key, "' of ", param,
                    " in the checkpoint has entries below 0");
  TORCH_CHECK_VALUE(key != "step" || value.equal(value.floor()), "'step' of ", param,
                    " in the checkpoint is ", value.item<double>(), ", which is no whole number");
}

NamedTensors loaded_state(const NamedTensors& fresh, const NamedTensors& saved,
                          const OptionalKeys& optional, const at::Tensor& param,
                          const std::string& name) {
  NamedTensors loaded = fresh;
  std::vector<std::string> missing, unexpected;
  for (const auto& [key, value] : saved) {
    if (const at::Tensor* needed = find_tensor(fresh, key)) {
      check_fits(value, *needed, key, name);
    } else if (contains(optional.buffers, key)) {
      loaded.emplace_back(key, parameter_shaped_zeros(param));
      check_fits(value, loaded.back().second, key, name);
    } else if (contains(optional.counts, key)) {
      loaded.emplace_back(key,
                          at::zeros({}, at::TensorOptions(at::kDouble).device(param.device())));
      check_fits(value, loaded.back().second, key, name);
    } else {
      unexpected.push_back(key);
    }
  }
  for (const auto& [key, tensor] : fresh) {
    if (find_tensor(saved, key) == nullptr) {
      missing.push_back(key);
    }
  }
  TORCH_CHECK_VALUE(missing.empty() && unexpected.empty(), "state of ", name,
                    " does not fit this optimizer and its options: missing ", listed(missing),
                    ", unexpected ", listed(unexpected));
  for (auto& [key, tensor] : loaded) {
    tensor.copy_(find_tensor(saved, key)->reshape(tensor.sizes()));
    check_numbers(tensor, key, name);
  }
  return loaded;
}

}  // namespace torchium::optim::detail
