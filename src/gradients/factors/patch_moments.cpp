#include "gradients/factors/patch_moments.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/factors/folded_images.h"
#include "cuda_kernels/factors/patch_moment.h"
#include "cuda_kernels/factors/second_moment.h"
#include "gradients/factors/device_products.h"
#include "support/alignment.h"
#include "support/device_code.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>

namespace torchium::gradients::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

using cuda_kernels::MomentParts;
using cuda_kernels::MomentProduct;

// Folded patches with fewer elements are faster formed, and padded patches with fewer multiplied.
constexpr int64_t kLeastFolded = 64;
constexpr double kMostPadding = 1.25;
constexpr int64_t kMostStride = 4;  // of the copy engine, for a box of 64 pixels in a row

// A convolution on images [n, channels, height, width].
struct PatchGeometry {
  int64_t samples, channels, count;  // of positions
  int64_t size[2], output_size[2], kernel[2], stride[2], padding[2], dilation[2];
  int64_t n;  // elements of a patch
  bool is_bfloat16;

  PatchGeometry(const LayerCall& call, const WeightGeometry& weight)
      : channels(weight.fan_in / (weight.kernel_height * weight.kernel_width)),
        kernel{weight.kernel_height, weight.kernel_width},
        n(weight.fan_in),
        is_bfloat16(call.output_gradient.scalar_type() == at::kBFloat16) {
    for (int i = 0; i < 2; ++i) {
      size[i] = call.input.size(i - 2);
      output_size[i] = call.output_gradient.size(i - 2);
      stride[i] = call.settings[kStrideHeight + i];
      padding[i] = call.settings[kPaddingHeight + i];
      dilation[i] = call.settings[kDilationHeight + i];
    }
    samples = call.input.numel() / (channels * size[0] * size[1]);
    count = samples * output_size[0] * output_size[1];
  }

  bool both(const int64_t (&values)[2], int64_t value) const {
    return values[0] == value && values[1] == value;
  }
  bool is_around_pixels() const {
    return both(kernel, cuda_kernels::kPatchSide) && both(stride, 1) && both(padding, 1) &&
           both(dilation, 1);
  }
  // Multiplications of a product of patches.
  double work() const {
    return static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(count);
  }
  cuda_kernels::Images images(const void* data) const {
    return cuda_kernels::contiguous_images(data, samples, size[0], size[1], as_int(channels),
                                           is_bfloat16);
  }
};

cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream(); }

// The plan of a product on images of which only the sizes are known; false: it takes more
// multiplications than `most`.
bool is_planned(const MomentProduct& product, double most, MomentParts& parts) {
  C10_CUDA_CHECK(cuda_kernels::plan_moment_product(product, parts));
  return parts.clusters > 0 && parts.multiplications() <= most;
}

at::Tensor images_of(const LayerCall& call) {
  return channels_last(
      operands_of(call, at::kFloat, /*keeps_16_bits=*/true, /*with_inputs=*/true).input);
}

// Vectors in one of the orders of VectorOrder.
void store_parts(at::Tensor& sum, const PatchGeometry& g, const at::Tensor& workspace,
                 const MomentParts& parts, cuda_kernels::SecondMoment moment, bool accumulate) {
  moment.product = workspace.const_data_ptr<float>();
  moment.parts = &parts;
  moment.target = sum.mutable_data_ptr<float>();
  moment.groups = 1;
  moment.n = moment.pitch = as_int(g.n);
  moment.order = as_int(sum.size(1));
  moment.pixels = as_int(g.kernel[0] * g.kernel[1]);
  moment.accumulate = accumulate;
  C10_CUDA_CHECK(cuda_kernels::store_second_moment(moment, stream()));
}

void store_products(at::Tensor& sum, const cuda_kernels::PatchProducts& products,
                    const MomentParts& parts, bool accumulate, const at::Tensor& images) {
  const at::Tensor workspace = product_in_parts(products.product, parts, images.options());
  C10_CUDA_CHECK(cuda_kernels::store_patch_moment({.products = &products,
                                                   .parts = &parts,
                                                   .workspace = workspace.const_data_ptr<float>(),
                                                   .target = sum.mutable_data_ptr<float>(),
                                                   .order = as_int(sum.size(1)),
                                                   .accumulate = accumulate},
                                                  stream()));
}

bool store_shifted(at::Tensor& sum, const PatchGeometry& g, const LayerCall& call,
                   at::Tensor& images, bool accumulate) {
  if (!g.is_around_pixels() || g.channels % 8 != 0) return false;
  cuda_kernels::PatchProducts products = cuda_kernels::patch_products(g.images(nullptr));
  MomentParts parts;
  // A product of patches needs half of all multiplications.
  if (!is_planned(products.product, 0.5 * g.work(), parts)) return false;
  images = images_of(call);
  if (!torchium::detail::is_aligned(images)) return false;
  products.product.images.data = images.const_data_ptr();
  store_products(sum, products, parts, accumulate, images);
  return true;
}

bool store_folded(at::Tensor& sum, const PatchGeometry& g, const LayerCall& call,
                  at::Tensor& images, bool accumulate) {
  const auto side = [&](int i) {
    return cuda_kernels::FoldedSide(as_int(g.size[i]), as_int(g.output_size[i]),
                                    as_int(g.kernel[i]), as_int(g.stride[i]), as_int(g.padding[i]));
  };
  cuda_kernels::FoldedImages folded{nullptr, nullptr, g.samples, as_int(g.channels),
                                    side(0), side(1)};
  if (!g.both(g.dilation, 1) || g.n < kLeastFolded || !folded.fits()) return false;
  images = images_of(call);
  const at::Tensor target =
      at::empty({folded.elements()}, images.options().memory_format(at::MemoryFormat::Contiguous));
  folded.images = images.const_data_ptr();
  folded.folded = target.mutable_data_ptr();
  constexpr int64_t kElements = cuda_kernels::FoldedImages::kElements;
  const int64_t row = folded.columns() * kElements;
  MomentProduct product =
      cuda_kernels::product_of_rows({.data = folded.folded,
                                     .samples = g.samples,
                                     .height = folded.y.folded(),
                                     .width = g.output_size[1],
                                     .channels = as_int(folded.x.of_patch() * kElements),
                                     .pixel_pitch = kElements,
                                     .row_pitch = row,
                                     .sample_pitch = folded.y.folded() * row,
                                     .is_bfloat16 = g.is_bfloat16});
  product.view[0] = {g.output_size[0], g.output_size[1], true};
  product.shifts = folded.y.of_patch();
  for (int i = 0; i < product.shifts; ++i) product.shift[i] = {i - folded.y.before, 0};
  MomentParts parts;
  C10_CUDA_CHECK(cuda_kernels::plan_moment_product(product, parts));
  if (parts.clusters == 0) return false;
  C10_CUDA_CHECK(cuda_kernels::fold(folded, stream()));
  const at::Tensor workspace = product_in_parts(product, parts, images.options());
  cuda_kernels::SecondMoment moment{};
  moment.vectors = cuda_kernels::VectorOrder::kFolded;
  moment.y = folded.y;
  moment.x = folded.x;
  store_parts(sum, g, workspace, parts, moment, accumulate);
  return true;
}

bool store_in_place(at::Tensor& sum, const PatchGeometry& g, const LayerCall& call,
                    at::Tensor& images, bool accumulate) {
  const int64_t pixels = g.kernel[0] * g.kernel[1];
  const bool is_view = pixels == 1 && g.both(g.stride, 1) && g.both(g.padding, 0);
  if (is_view || g.channels % 64 != 0 || pixels > MomentProduct::kMostShifts ||
      std::max(g.stride[0], g.stride[1]) > kMostStride) {
    return false;
  }
  MomentProduct product = cuda_kernels::product_of_rows(g.images(nullptr));
  product.stride = {as_int(g.stride[0]), as_int(g.stride[1])};
  product.view[0] = {g.output_size[0], g.output_size[1], true};
  product.shifts = as_int(pixels);
  for (int64_t i = 0; i < pixels; ++i) {
    product.shift[i] = {as_int(i / g.kernel[1] * g.dilation[0] - g.padding[0]),
                        as_int(i % g.kernel[1] * g.dilation[1] - g.padding[1])};
  }
  MomentParts parts;
  if (!is_planned(product, kMostPadding * g.work(), parts)) return false;
  images = images_of(call);
  if (!torchium::detail::is_aligned(images)) return false;
  product.images.data = images.const_data_ptr();
  if (g.both(g.kernel, cuda_kernels::kPatchSide)) {
    store_products(sum, cuda_kernels::products_of_patches(product), parts, accumulate, images);
    return true;
  }
  const at::Tensor workspace = product_in_parts(product, parts, images.options());
  cuda_kernels::SecondMoment moment{};
  moment.vectors =
      pixels == 1 ? cuda_kernels::VectorOrder::kOfWeight : cuda_kernels::VectorOrder::kPixels;
  store_parts(sum, g, workspace, parts, moment, accumulate);
  return true;
}

// The sum of all patches, in the order of the weight.
at::Tensor sum_of_patches(const PatchGeometry& g, const at::Tensor& images) {
  const at::Tensor image =
      at::constant_pad_nd(images.sum(0, /*keepdim=*/false, at::kFloat),
                          {g.padding[1], g.padding[1], g.padding[0], g.padding[0]});
  const auto step = image.strides();
  return image
      .as_strided({g.channels, g.kernel[0], g.kernel[1], g.output_size[0], g.output_size[1]},
                  {step[0], step[1] * g.dilation[0], step[2] * g.dilation[1], step[1] * g.stride[0],
                   step[2] * g.stride[1]})
      .sum({3, 4})
      .reshape(-1);
}

// The row and the column for a bias.
void store_bias(at::Tensor& sum, const PatchGeometry& g, const at::Tensor& images,
                bool accumulate) {
  const at::Tensor patches = sum_of_patches(g, images);
  const at::Tensor last = at::cat({patches, at::full({1}, g.count, patches.options())});
  const at::Tensor row = sum[0][g.n];
  accumulate ? row.add_(last) : row.copy_(last);
  sum[0].select(1, g.n).narrow(0, 0, g.n).copy_(row.narrow(0, 0, g.n));
}

}  // namespace

bool store_patch_moment(at::Tensor& sum, const LayerCall& call, const WeightGeometry& weight,
                        bool accumulate) {
  if (sum.dim() != 3 || sum.size(1) != sum.size(2) ||
      !at::isReducedFloatingType(call.output_gradient.scalar_type())) {
    return false;
  }
  torchium::detail::check_device_code(sum.device());
  const c10::cuda::CUDAGuard guard(sum.device());
  const PatchGeometry geometry(call, weight);
  at::Tensor images;
  if (!has_moment_products() || (!store_shifted(sum, geometry, call, images, accumulate) &&
                                 !store_folded(sum, geometry, call, images, accumulate) &&
                                 !store_in_place(sum, geometry, call, images, accumulate))) {
    return false;
  }
  sum.unsafeGetTensorImpl()->bump_version();
  if (sum.size(1) > geometry.n) store_bias(sum, geometry, images, accumulate);
  return true;
}

#else

bool store_patch_moment(at::Tensor&, const LayerCall&, const WeightGeometry&, bool) {
  return false;
}

#endif

}  // namespace torchium::gradients::detail
