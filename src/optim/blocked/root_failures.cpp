#include "optim/blocked/root_failures.h"

#include "optim/core/step_status.h"

#include <ATen/ATen.h>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/optimizer_step/step_control.h"
#include "optim/core/cuda/kernel_tables.h"
#include "support/device_code.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::optim::detail {
namespace {

#ifdef TORCHIUM_WITH_CUDA
void record_on_device(const std::vector<RootFailures>& all, at::Tensor& status) {
  torchium::detail::check_device_code(status.device());
  const c10::cuda::CUDAGuard device_guard(status.device());
  KernelTables<cuda_kernels::FailureEntry> tables;
  for (const auto& [counts, param] : all) {
    tables.add({.failures = counts.const_data_ptr<int>(),
                .matrices = static_cast<int>(counts.numel()),
                .index = static_cast<int>(param)},
               1);
  }
  bool is_first = true;
  for (const auto& table : tables) {
    C10_CUDA_CHECK(cuda_kernels::record_failures(table, status.mutable_data_ptr<int64_t>(),
                                                 is_first, c10::cuda::getCurrentCUDAStream()));
    is_first = false;
  }
  status.unsafeGetTensorImpl()->bump_version();
}
#endif

}  // namespace

void record_root_failures(const std::vector<RootFailures>& all, at::Tensor& status) {
#ifdef TORCHIUM_WITH_CUDA
  if (status.is_cuda() && !all.empty()) {
    record_on_device(all, status);
    return;
  }
#endif
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
