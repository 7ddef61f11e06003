#include "optim/sharing/cuda/gradient_scan.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/optimizer_step/step_control.h"
#include "optim/core/cuda/kernel_tables.h"
#include "optim/core/cuda/kernel_tensors.h"
#include "support/device_code.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <ATen/ATen.h>

namespace torchium::optim::detail {

#ifdef TORCHIUM_WITH_CUDA

bool has_scan_kernels(c10::Device device) { return device.is_cuda(); }

GradientScan scan_by_kernels(const std::vector<std::vector<Examined>>& groups, c10::Device device) {
  torchium::detail::check_device_code(device);
  KernelTables<cuda_kernels::GivenEntry> tables;
  int64_t tensors = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const auto& [tensor, param, largest, steps] : groups[g]) {
      const int64_t place = tensors++, elements = tensor.numel();
      const bool in_rows = has_rows_apart(tensor);
      if (elements > 0) {
        tables.add({.data = tensor.const_data_ptr(),
                    .elements = elements,
                    .first_tile = 0,
                    .place = static_cast<int>(place),
                    .group = static_cast<int>(g),
                    .parameter = static_cast<int>(param),
                    .type = element_type(tensor.scalar_type()),
                    .step = steps.defined() ? steps.const_data_ptr<double>() : nullptr,
                    .limit = largest,
                    .columns = in_rows ? static_cast<int>(tensor.size(1)) : 0,
                    .row_stride = in_rows ? tensor.stride(0) : 0},
                   static_cast<int>((elements - 1) / cuda_kernels::kScanTile + 1));
      }
    }
  }
  const auto count = static_cast<int64_t>(groups.size());
  const at::Tensor found = at::zeros({count + tensors}, at::TensorOptions(device).dtype(at::kInt));
  GradientScan scan{found.narrow(0, 0, count), found.narrow(0, count, tensors)};
  for (const auto& table : tables) {
    C10_CUDA_CHECK(
        cuda_kernels::examine(table, scan.unfit.mutable_data_ptr<int>(),
                              reinterpret_cast<unsigned*>(scan.largest.mutable_data_ptr<int>()),
                              c10::cuda::getCurrentCUDAStream()));
  }
  return scan;
}

#else

bool has_scan_kernels(c10::Device) { return false; }

GradientScan scan_by_kernels(const std::vector<std::vector<Examined>>&, c10::Device) {
  TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}

#endif

}  // namespace torchium::optim::detail
