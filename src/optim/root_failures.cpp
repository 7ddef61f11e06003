#include "optim/root_failures.h"

#include "optim/step_status.h"

#include <ATen/ATen.h>

namespace torchium::optim::detail {

void record_root_failures(const std::vector<RootFailures>& all, at::Tensor& status) {
  std::vector<at::Tensor> largest;
  std::vector<at::Tensor> params;
  for (const auto& [counts, param] : all) {
    const at::Tensor worst = counts.max();
    if (worst.is_cpu() && worst.item<int>() == 0) {
      continue;
    }
    largest.push_back(worst);
    params.push_back(at::full({}, param, status.options()));
  }
  at::Tensor count = status.select(0, kConsecutiveRootFailures);
  at::Tensor param = status.select(0, kFailedParameter);
  if (largest.empty()) {
    count.zero_();
    param.fill_(-1);
    return;
  }
  const auto [worst, index] = at::stack(largest).max(0);
  count.copy_(worst);
  const at::Tensor failed = at::stack(params).index_select(0, index.view({1})).squeeze(0);
  param.copy_(at::where(worst.gt(0), failed, at::full_like(failed, -1)));
}

}  // namespace torchium::optim::detail
