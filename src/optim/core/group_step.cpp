#include "optim/core/group_step.h"

#include "optim/core/parameter_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {

at::Tensor parameter_shaped_zeros(const at::Tensor& param) {
  return at::zeros_like(param, param.options().dtype(state_dtype(param)).requires_grad(false));
}

std::vector<std::pair<c10::Device, std::vector<at::Tensor>>> split_by_device(
    std::vector<at::Tensor> params) {
  std::vector<std::pair<c10::Device, std::vector<at::Tensor>>> result;
  for (auto& param : params) {
    auto found = std::find_if(result.begin(), result.end(),
                              [&](const auto& entry) { return entry.first == param.device(); });
    if (found == result.end()) {
      found = result.emplace(result.end(), param.device(), std::vector<at::Tensor>());
    }
    found->second.push_back(std::move(param));
  }
  return result;
}

}  // namespace torchium::optim::detail
