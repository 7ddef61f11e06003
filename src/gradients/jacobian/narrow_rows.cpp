#include "gradients/jacobian/narrow_rows.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/samples/narrow_rows.h"
#include "support/device_code.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>
#include <limits>

namespace torchium::gradients::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

bool is_narrow(const PositionImages& x) {
  const auto is_float = [](const at::Tensor& tensor) {
    return tensor.is_cuda() && tensor.scalar_type() == at::kFloat && tensor.numel() > 0 &&
           tensor.numel() / tensor.size(0) < std::numeric_limits<int>::max() / 2;
  };
  return x.weight.groups == 1 && x.weight.fan_in <= cuda_kernels::NarrowRows::kMostInputs &&
         x.positions() > 1 && is_float(x.input) && is_float(x.gradient) &&
         x.gradient.is_contiguous() &&
         x.samples() * x.weight.fan_out < std::numeric_limits<int>::max();
}

void form_rows(const DeviceRows::Call& call, const NarrowRows& result) {
  const auto& [images, first_row] = call;
  const at::Tensor &input = images.input, &gradient = images.gradient;
  const int64_t fan_out = images.weight.fan_out;
  cuda_kernels::NarrowRows p{};
  p.input = input.const_data_ptr<float>();
  std::ranges::copy(input.strides(), p.strides);
  p.gradient = gradient.const_data_ptr<float>();
  p.fan_out = as_int(fan_out);
  p.samples = as_int(images.samples());
  p.rows = result.weight.mutable_data_ptr<float>() + first_row * fan_out * images.weight.fan_in;
  p.sums = result.bias.mutable_data_ptr<float>() + first_row * fan_out;
  set_patches(p, images);
  C10_CUDA_CHECK(cuda_kernels::narrow_rows(p, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace

std::optional<NarrowRows> narrow_rows(const std::vector<DeviceRows::Call>& calls, int64_t samples) {
  const auto takes = [](const DeviceRows::Call& call) { return is_narrow(call.images); };
  if (!std::all_of(calls.begin(), calls.end(), takes) || !have_own_rows(calls, samples)) {
    return std::nullopt;
  }
  const auto& [input, gradient, weight, settings] = calls[0].images;
  torchium::detail::check_device_code(input.device());
  const c10::cuda::CUDAGuard guard(input.device());
  const auto options = gradient.options();
  const NarrowRows result{at::empty({samples, 1, weight.fan_out, weight.fan_in}, options),
                          at::empty({samples, weight.fan_out}, options)};
  for (const auto& call : calls) {
    form_rows(call, result);
  }
  return result;
}

#else

std::optional<NarrowRows> narrow_rows(const std::vector<DeviceRows::Call>&, int64_t) {
  return std::nullopt;
}

#endif

}  // namespace torchium::gradients::detail
