#include "gradients/factors/device_factors.h"

#include "gradients/factors/device_products.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/factors/column_sums.h"
#include "cuda_kernels/factors/moment_product.h"
#include "cuda_kernels/factors/second_moment.h"
#include "cuda_kernels/factors/unfold.h"
#include "support/alignment.h"
#include "support/device_code.h"

#include <ATen/ops/bmm.h>
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

constexpr int64_t kPitch = 8;  // elements; cuBLAS is slow with other rows

bool fits_int(const at::Tensor& tensor) {
  return tensor.numel() / std::max<int64_t>(1, tensor.size(0)) < std::numeric_limits<int>::max();
}

// Whether the vectors in X [1, vector, count] are rows of a matrix of 16-bit elements.
bool has_short_rows(const at::Tensor& X) {
  return X.scalar_type() != at::kFloat && X.size(0) == 1 && X.stride(1) == 1 &&
         X.stride(2) >= X.size(1) && X.stride(2) % kPitch == 0 && torchium::detail::is_aligned(X);
}

// The sums of the vectors in X [groups, vector, count]: [parts, groups, vector], to be added.
at::Tensor sums_of(const at::Tensor& X) {
  if (!has_short_rows(X) || X.stride(2) != X.size(1)) {
    return X.sum(2, /*keepdim=*/false, at::kFloat).unsqueeze(0);
  }
  const at::Tensor sums =
      at::empty({cuda_kernels::kSumParts, 1, X.size(1)}, X.options().dtype(at::kFloat));
  C10_CUDA_CHECK(cuda_kernels::column_sums({.X = X.const_data_ptr(),
                                            .count = X.size(2),
                                            .pitch = as_int(X.size(1)),
                                            .is_bfloat16 = X.scalar_type() == at::kBFloat16,
                                            .sums = sums.mutable_data_ptr<float>()},
                                           c10::cuda::getCurrentCUDAStream()));
  return sums;
}

}  // namespace

bool has_device_positions(const LayerCall& call, const WeightGeometry& weight,
                          at::ScalarType sums) {
  const auto is_known = [](const at::Tensor& tensor) {
    return tensor.is_cuda() && tensor.numel() > 0 && fits_int(tensor);
  };
  return call.kind == LayerKind::kConv2d && weight.groups == 1 && sums == at::kFloat &&
         is_known(call.input) && is_known(call.output_gradient);
}

DevicePositions::DevicePositions(const LayerCall& call, const WeightGeometry& weight,
                                 bool with_inputs)
    : weight_(weight), settings_(call.settings) {
  const auto [input, gradient] = operands_of(call, at::kFloat, /*keeps_16_bits=*/true, with_inputs);
  input_ = with_inputs ? channels_last(input) : at::Tensor();
  gradient_ = channels_last(gradient);
}

int64_t DevicePositions::piece() const {
  return input_.defined()
             ? std::max<int64_t>(1, max_patch_elements(input_) / (weight_.fan_in * positions()))
             : samples();
}

Positions DevicePositions::of_samples(int64_t first, int64_t count) const {
  const at::Tensor G =
      gradient_.narrow(0, first, count).permute({0, 2, 3, 1}).flatten(1, 2).unsqueeze(0);
  return {input_.defined() ? unfolded(input_.narrow(0, first, count)).unsqueeze(0) : at::Tensor(),
          G};
}

// images: [n, channels, height, width]. Returns [n, T, pixels * channels].
at::Tensor DevicePositions::unfolded(const at::Tensor& images) const {
  const int64_t height = gradient_.size(2), width = gradient_.size(3);
  const bool is_view = pixels() == 1 && height == images.size(2) && width == images.size(3) &&
                       settings_[kPaddingHeight] == 0 && settings_[kPaddingWidth] == 0;
  if (is_view) {
    return images.permute({0, 2, 3, 1}).flatten(1, 2);
  }
  torchium::detail::check_device_code(images.device());
  const int64_t pitch = (weight_.fan_in + kPitch - 1) / kPitch * kPitch;
  const at::Tensor patches =
      at::empty({images.size(0), height * width, pitch},
                images.options().memory_format(at::MemoryFormat::Contiguous));
  cuda_kernels::Unfold unfold{};
  unfold.images = images.const_data_ptr();
  unfold.patches = patches.mutable_data_ptr();
  unfold.samples = images.size(0);
  unfold.pitch = as_int(pitch);
  unfold.element_bytes = as_int(images.element_size());
  set_patches(unfold, {images, gradient_, weight_, settings_});
  const c10::cuda::CUDAGuard guard(images.device());
  C10_CUDA_CHECK(cuda_kernels::unfold(unfold, c10::cuda::getCurrentCUDAStream()));
  return patches;
}

bool has_moment_kernel(const at::Tensor& sum, const at::Tensor& X) {
  return sum.is_cuda() && sum.scalar_type() == at::kFloat && sum.dim() == 3 &&
         sum.is_contiguous() && sum.size(0) <= cuda_kernels::kMostMoments && sum.numel() > 0 &&
         X.size(2) > 0 &&
         (X.scalar_type() == at::kFloat || at::isReducedFloatingType(X.scalar_type()));
}

void store_moment(at::Tensor& sum, const at::Tensor& X, int64_t length, int64_t pixels,
                  bool accumulate) {
  torchium::detail::check_device_code(sum.device());
  const at::NoTF32Guard full_precision;
  const c10::cuda::CUDAGuard guard(sum.device());
  const bool is_short = X.scalar_type() != at::kFloat;
  cuda_kernels::MomentParts parts;
  at::Tensor product;
  if (has_short_rows(X) && has_moment_products()) {
    const cuda_kernels::MomentProduct rows =
        cuda_kernels::product_of_rows({.data = X.const_data_ptr(),
                                       .samples = 1,
                                       .height = 1,
                                       .width = X.size(2),
                                       .channels = as_int(X.size(1)),
                                       .pixel_pitch = X.stride(2),
                                       .row_pitch = X.stride(2) * X.size(2),
                                       .sample_pitch = X.stride(2) * X.size(2),
                                       .is_bfloat16 = X.scalar_type() == at::kBFloat16});
    C10_CUDA_CHECK(cuda_kernels::plan_moment_product(rows, parts));
    if (parts.clusters > 0 && cuda_kernels::saves_work(parts, X.size(1))) {
      product = product_in_parts(rows, parts, X.options());
    }
  }
  const bool has_parts = product.defined();
  if (!has_parts) {
    // cuBLAS is slow where the rows of a result begin at odd places, as those of a sum with a row
    // for the bias do.
    product = is_short              ? at::bmm(X, X.mT(), at::kFloat)
              : has_gram_of_rows(X) ? gram_of_rows(X)
                                    : at::bmm(X, X.mT());
  }
  const at::Tensor sums = sum.size(1) > length ? sums_of(X) : at::Tensor();
  C10_CUDA_CHECK(cuda_kernels::store_second_moment(
      {.product = product.const_data_ptr<float>(),
       .parts = has_parts ? &parts : nullptr,
       .sums = sums.defined() ? sums.const_data_ptr<float>() : nullptr,
       .sum_parts = sums.defined() ? as_int(sums.size(0)) : 0,
       .target = sum.mutable_data_ptr<float>(),
       .groups = as_int(sum.size(0)),
       .n = as_int(length),
       .pitch = as_int(X.size(1)),
       .order = as_int(sum.size(1)),
       .count = static_cast<float>(X.size(2)),
       .vectors =
           pixels == 1 ? cuda_kernels::VectorOrder::kOfWeight : cuda_kernels::VectorOrder::kPixels,
       .pixels = as_int(pixels),
       .accumulate = accumulate},
      c10::cuda::getCurrentCUDAStream()));
  sum.unsafeGetTensorImpl()->bump_version();
}

#else

bool has_device_positions(const LayerCall&, const WeightGeometry&, at::ScalarType) { return false; }
DevicePositions::DevicePositions(const LayerCall&, const WeightGeometry& weight, bool)
    : weight_(weight) {}
int64_t DevicePositions::piece() const { return 1; }
Positions DevicePositions::of_samples(int64_t, int64_t) const { return {}; }
bool has_moment_kernel(const at::Tensor&, const at::Tensor&) { return false; }
void store_moment(at::Tensor&, const at::Tensor&, int64_t, int64_t, bool) {
  TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}
#endif

}  // namespace torchium::gradients::detail
