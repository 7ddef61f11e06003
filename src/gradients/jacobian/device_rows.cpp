#include "gradients/jacobian/device_sums.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/samples/sample_products.h"
#include "cuda_kernels/samples/split_positions.h"
#include "support/device_code.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>
#include <limits>
#include <set>

namespace torchium::gradients::detail {

bool have_own_rows(const std::vector<DeviceRows::Call>& calls, int64_t samples) {
  std::set<int64_t> rows;
  int64_t covered = 0;
  for (const auto& [images, first_row] : calls) {
    rows.insert(first_row);
    covered += images.samples();
  }
  return rows.size() == calls.size() && covered == samples;
}

#ifdef TORCHIUM_WITH_CUDA
namespace {

// Smaller matrices waste most of a tile of 128 x 128.
constexpr int64_t kLeastElements = 1024;
// Elements of rows in parts that exist at a time: 512 MB.
constexpr int64_t kMostPartElements = int64_t{1} << 27;
constexpr int64_t kBytesOfElement = 4;  // both parts

int64_t rounded_up(int64_t size) { return (size + 7) / 8 * 8; }

bool is_supported(const PositionImages& x) {
  const auto is_small = [](int64_t size) { return size < std::numeric_limits<int>::max() / 64; };
  const auto is_float = [&](const at::Tensor& tensor) {
    return tensor.is_cuda() && tensor.scalar_type() == at::kFloat && tensor.numel() > 0 &&
           is_small(tensor.numel() / tensor.size(0));
  };
  const auto& [groups, fan_in, fan_out, height, width, depth] = x.weight;
  return is_float(x.input) && is_float(x.gradient) && x.positions() > 1 &&
         is_small(groups * fan_in * rounded_up(x.positions()) / 8) &&
         fan_in * fan_out >= kLeastElements && is_small(groups * fan_in * fan_out) &&
         is_small(x.samples() * groups);
}

// Positions lie side by side, so images whose channels do are copied.
at::Tensor plain(const at::Tensor& images) {
  const bool is_sequence =
      images.stride(1) == 1 && images.size(2) == 1 && images.transpose(1, 3).is_contiguous();
  return is_sequence ? images : images.contiguous();
}

}  // namespace

struct DeviceRows::Operands {
  at::Tensor hi_and_lo;  // memory of the fp16 parts
  cuda_kernels::SampleProduct product;
};

bool DeviceRows::are_supported(const std::vector<Call>& calls, int64_t samples) {
  for (const auto& call : calls) {
    if (!is_supported(call.images) || call.images.positions() != calls[0].images.positions()) {
      return false;
    }
  }
  if (!have_own_rows(calls, samples)) {
    return false;
  }
  const auto* device = at::cuda::getDeviceProperties(calls[0].images.input.device().index());
  return cuda_kernels::has_sample_products(device->major, device->minor,
                                           static_cast<int>(device->sharedMemPerBlockOptin));
}

DeviceRows::DeviceRows(std::vector<Call> calls, int64_t samples, int64_t max_bytes, bool with_bias)
    : calls_(std::move(calls)), samples_(samples) {
  for (auto& [images, first_row] : calls_) {
    images.input = plain(images.input);
    images.gradient = plain(images.gradient);
  }
  const int64_t of_sample = kBytesOfElement * weight().groups *
                            (weight().fan_in + weight().fan_out) * rounded_up(positions());
  piece_ = std::clamp<int64_t>(max_bytes / of_sample, 1, samples);
  const at::Tensor& input = calls_[0].images.input;
  torchium::detail::check_device_code(input.device());
  scales_ = at::empty({2, samples}, input.options().memory_format(at::MemoryFormat::Contiguous));
  const bool can_sum = std::all_of(calls_.begin(), calls_.end(), [](const Call& call) {
    return call.images.gradient.is_contiguous();
  });
  if (with_bias && can_sum) {
    bias_rows_ = at::empty({samples, weight().groups * weight().fan_out}, scales_.options());
  }
}

DeviceRows::~DeviceRows() = default;

DeviceRows::Operands DeviceRows::split(const Call& call, int64_t first, int64_t count) const {
  const auto& [images, first_row] = call;
  const WeightGeometry& weight = images.weight;
  const int64_t pitch = rounded_up(positions());
  const int64_t of_A = count * weight.groups * weight.fan_in * pitch;
  const int64_t of_G = count * weight.groups * weight.fan_out * pitch;
  const auto options = scales_.options();
  Operands result{at::empty({2 * (of_A + of_G)}, options.dtype(at::kHalf)), {}};
  auto* half = static_cast<__half*>(result.hi_and_lo.mutable_data_ptr());
  auto* scale = scales_.mutable_data_ptr<float>() + first_row + first;
  const at::Tensor largest = at::zeros({2, count}, options.dtype(at::kInt));
  auto* bits = reinterpret_cast<unsigned*>(largest.mutable_data_ptr<int>());
  const auto operand = [&](const PositionImages& x, int64_t rows, __half* hi, float* scale) {
    cuda_kernels::SplitPositions p{};
    p.images = x.input.const_data_ptr<float>() + first * x.input.stride(0);
    std::ranges::copy(x.input.strides(), p.strides);
    p.parts = {.hi = hi,
               .lo = hi + count * rows * pitch,
               .scale = scale,
               .rows = as_int(rows),
               .columns = as_int(pitch),
               .has_scales = true};
    set_patches(p, x);
    return p;
  };
  auto A = operand(images, weight.groups * weight.fan_in, half, scale);
  auto G = operand({images.gradient, images.gradient, {}, settings_of_pixels()},
                   weight.groups * weight.fan_out, half + 2 * of_A, scale + samples_);
  A.largest = bits;
  G.largest = bits + count;
  if (bias_rows_.defined()) {
    G.sums = bias_rows_.mutable_data_ptr<float>() + (first_row + first) * G.channels;
  }
  C10_CUDA_CHECK(
      cuda_kernels::split_positions(A, G, as_int(count), c10::cuda::getCurrentCUDAStream()));
  auto& product = result.product;
  product = {A.parts,
             G.parts,
             as_int(count),
             as_int(weight.groups),
             as_int(positions()),
             0,
             as_int(weight.fan_out)};
  product.A.rows = as_int(weight.fan_in);  // of a group
  product.G.rows = as_int(weight.fan_out);
  return result;
}

template <typename Visit>
void DeviceRows::for_each_piece(const Visit& visit) {
  const c10::cuda::CUDAGuard guard(scales_.device());
  for (const auto& call : calls_) {
    const int64_t samples = call.images.samples();
    const bool is_only = calls_.size() == 1 && piece_ >= samples;
    if (is_only) {
      if (!kept_) {
        kept_ = std::make_unique<Operands>(split(call, 0, samples));
      }
      visit(kept_->product, call.first_row);
      continue;
    }
    for (int64_t first = 0; first < samples; first += piece_) {
      const Operands operands = split(call, first, std::min(piece_, samples - first));
      visit(operands.product, call.first_row + first);
    }
  }
}

DeviceRows::Squares DeviceRows::squares() {
  at::Tensor tiles;
  for_each_piece([&](const cuda_kernels::SampleProduct& product, int64_t row) {
    const int64_t of_sample = cuda_kernels::squares_of_sample(product);
    if (!tiles.defined()) {
      tiles = at::empty({samples_, of_sample}, scales_.options());
    }
    C10_CUDA_CHECK(cuda_kernels::sample_squares(product,
                                                tiles.mutable_data_ptr<float>() + row * of_sample,
                                                c10::cuda::getCurrentCUDAStream()));
  });
  const double scale = cuda_kernels::scale_of_positions(static_cast<int>(positions()));
  return {tiles, scales_, scale * scale};
}

void DeviceRows::store(const at::Tensor& rows, int64_t first_output, const at::Tensor& w) {
  const at::Tensor weights = w.defined() ? w.contiguous() : w;
  for_each_piece([&](cuda_kernels::SampleProduct product, int64_t row) {
    product.first_output = static_cast<int>(first_output);
    product.outputs = static_cast<int>(rows.size(2));
    const int64_t of_sample = rows.numel() / samples_;
    C10_CUDA_CHECK(cuda_kernels::sample_rows(
        product, weights.defined() ? weights.const_data_ptr<float>() + row : nullptr,
        rows.mutable_data_ptr<float>() + row * of_sample, c10::cuda::getCurrentCUDAStream()));
  });
}

void DeviceRows::add_gram_(at::Tensor& K, double factor) {
  if (!K.defined()) {
    K = at::zeros({samples_, samples_}, scales_.options().dtype(at::kDouble));
  }
  const int64_t pitch = rounded_up(weight().fan_in), groups = weight().groups;
  const int64_t fan_out = weight().fan_out;
  const int64_t of_output = samples_ * groups * pitch;
  const int64_t chunks =
      std::min(fan_out, (fan_out * of_output + kMostPartElements - 1) / kMostPartElements);
  const int64_t chunk = (fan_out + chunks - 1) / chunks;
  const double scale = cuda_kernels::scale_of_positions(static_cast<int>(positions()));
  for (int64_t first = 0; first < fan_out; first += chunk) {
    const int64_t outputs = std::min(chunk, fan_out - first);
    const int64_t elements = outputs * of_output, of_sample = elements / samples_;
    const at::Tensor J = at::empty({2, elements}, scales_.options().dtype(at::kHalf));
    auto* hi = static_cast<__half*>(J.mutable_data_ptr());
    for_each_piece([&](cuda_kernels::SampleProduct product, int64_t row) {
      product.first_output = static_cast<int>(first);
      product.outputs = static_cast<int>(outputs);
      C10_CUDA_CHECK(
          cuda_kernels::sample_parts(product, hi + row * of_sample, hi + elements + row * of_sample,
                                     static_cast<int>(pitch), c10::cuda::getCurrentCUDAStream()));
    });
    cuda_kernels::SampleGram gram{.J = {.hi = hi,
                                        .lo = hi + elements,
                                        .scale = nullptr,
                                        .rows = static_cast<int>(samples_),
                                        .columns = static_cast<int>(of_sample),
                                        .has_scales = false},
                                  .scale_A = scales_.const_data_ptr<float>(),
                                  .scale_G = scales_.const_data_ptr<float>() + samples_,
                                  .factor = factor * scale * scale,
                                  .K = K.mutable_data_ptr<double>()};
    int64_t floats = 0;
    const c10::cuda::CUDAGuard guard(scales_.device());
    C10_CUDA_CHECK(cuda_kernels::plan_sample_gram(gram, floats));
    const at::Tensor workspace = at::empty({floats}, scales_.options());
    C10_CUDA_CHECK(cuda_kernels::sample_gram(gram, workspace.mutable_data_ptr<float>(),
                                             c10::cuda::getCurrentCUDAStream()));
  }
}

#else

struct DeviceRows::Operands {};
bool DeviceRows::are_supported(const std::vector<Call>&, int64_t) { return false; }
DeviceRows::DeviceRows(std::vector<Call> calls, int64_t samples, int64_t, bool)
    : calls_(std::move(calls)), samples_(samples), piece_(1) {}
DeviceRows::~DeviceRows() = default;
DeviceRows::Squares DeviceRows::squares() { return {}; }
void DeviceRows::store(const at::Tensor&, int64_t, const at::Tensor&) {}
void DeviceRows::add_gram_(at::Tensor&, double) {}

#endif

}  // namespace torchium::gradients::detail
