#include "distributed/step_message.h"

#include "cuda_kernels/optimizer_step/message_slots.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/optimizer_step/step_message.h"
#include "support/device_code.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <ATen/ATen.h>

#include <algorithm>

namespace torchium::distributed {
namespace {

using enum cuda_kernels::MessageSlot;
using cuda_kernels::kMessageSize;
using cuda_kernels::kMostMessageGroups;

// The slots of the first unfit parameter of each group.
at::Tensor unfit_slots(const at::Tensor& message, size_t groups) {
  const auto count = static_cast<int64_t>(groups);
  return message.narrow(0, kGroups, 2 * count).view({count, 2}).select(1, 0);
}

void add_findings(at::Tensor& message, const DeviceFindings& on_device, size_t groups) {
  if (on_device.found_inf.defined()) {
    message.narrow(0, kFoundInf, 1).copy_(on_device.found_inf.view({1}).ne(0));
  }
  if (on_device.failure.defined()) {
    message.narrow(0, kFailure, 1).copy_(on_device.failure.view({1}));
  }
  if (on_device.unfit.defined()) {
    unfit_slots(message, groups).copy_(on_device.unfit);
  }
}

#ifdef TORCHIUM_WITH_CUDA
void pack_by_kernel(const std::vector<int64_t>& host, const DeviceFindings& on_device,
                    size_t groups, at::Tensor& message) {
  cuda_kernels::HostNumbers numbers{};
  std::ranges::copy(host, numbers.values);
  const at::Tensor found_inf = on_device.found_inf.defined()
                                   ? on_device.found_inf.to(message.options().dtype(at::kFloat))
                                   : at::Tensor();
  const at::Tensor &failure = on_device.failure, &unfit = on_device.unfit;
  C10_CUDA_CHECK(cuda_kernels::pack_message(
      numbers,
      {.found_inf = found_inf.defined() ? found_inf.const_data_ptr<float>() : nullptr,
       .failure = failure.defined() ? failure.const_data_ptr<int64_t>() : nullptr,
       .unfit = unfit.defined() ? unfit.const_data_ptr<int>() : nullptr,
       .groups = static_cast<int>(groups)},
      message.mutable_data_ptr<int64_t>(), c10::cuda::getCurrentCUDAStream()));
}
#endif

}  // namespace

at::Tensor packed_message(const std::vector<int64_t>& host, const DeviceFindings& on_device,
                          size_t groups, c10::Device device) {
  TORCH_INTERNAL_ASSERT(host.size() == kMessageSize && groups <= kMostMessageGroups);
#ifdef TORCHIUM_WITH_CUDA
  if (device.is_cuda()) {
    torchium::detail::check_device_code(device);
    at::Tensor message = at::empty({kMessageSize}, at::TensorOptions(device).dtype(at::kLong));
    pack_by_kernel(host, on_device, groups, message);
    return message;
  }
#endif
  at::Tensor message = at::tensor(host, at::kLong).to(device);
  add_findings(message, on_device, groups);
  return message;
}

at::Tensor skipped_groups(const at::Tensor& message, size_t groups) {
#ifdef TORCHIUM_WITH_CUDA
  if (message.is_cuda()) {
    const at::Tensor skipped =
        at::empty({static_cast<int64_t>(groups)}, message.options().dtype(at::kFloat));
    C10_CUDA_CHECK(cuda_kernels::find_skipped_groups(
        message.const_data_ptr<int64_t>(), static_cast<int>(groups),
        skipped.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
    return skipped;
  }
#endif
  const at::Tensor differences =
      message.narrow(0, kSetup, kCounts - kSetup).view({-1, 2}).sum(1).ne(0).any();
  const at::Tensor all = message.narrow(0, kError, kFoundInf + 1).ne(0).any();
  return unfit_slots(message, groups)
      .ne(0)
      .logical_or_(all)
      .logical_or_(differences)
      .to(at::kFloat);
}

void keep_message(const at::Tensor& message, at::Tensor& kept, at::Tensor& skips) {
#ifdef TORCHIUM_WITH_CUDA
  if (message.is_cuda()) {
    C10_CUDA_CHECK(cuda_kernels::keep_message(
        message.const_data_ptr<int64_t>(), kept.mutable_data_ptr<int64_t>(),
        skips.mutable_data_ptr<int64_t>(), c10::cuda::getCurrentCUDAStream()));
    return;
  }
#endif
  kept.copy_(message);
  const at::Tensor counted = (skips + 1) * unfit_slots(message, kMostMessageGroups).ne(0);
  skips.copy_(at::where(message[kFoundInf].ne(0), skips, counted));
}

}  // namespace torchium::distributed
