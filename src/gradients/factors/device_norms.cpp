#include "gradients/factors/device_norms.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/factors/norm_moments.h"
#include "gradients/jacobian/dense_rows.h"
#include "linalg/common/element_type.h"
#include "support/device_code.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>
#include <utility>
#endif

namespace torchium::gradients::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

using cuda_kernels::ElementType;
using cuda_kernels::NormBlocks;
using cuda_kernels::NormInput;
using cuda_kernels::NormParts;
using cuda_kernels::NormStatistics;

// Numbers of parts and of thread blocks stay below 2^31.
constexpr int64_t kMostElements = int64_t{1} << 36, kMostSamples = int64_t{1} << 24;

std::optional<ElementType> type_of(const at::Tensor& tensor) {
  return linalg::detail::element_type(tensor.scalar_type());
}

bool is_normed_by_rows(const LayerCall& call) {
  return call.kind == LayerKind::kLayerNorm || call.kind == LayerKind::kRmsNorm;
}

// Elements of the weight.
int64_t channels_of(const LayerCall& call) {
  const at::Tensor& x = call.input;
  return is_normed_by_rows(call)
             ? c10::multiply_integers(x.sizes().slice(x.dim() - call.settings[kNormalizedDims]))
             : x.size(1);
}

bool has_known_type(const at::Tensor& tensor) {
  const auto type = type_of(tensor);
  return tensor.is_cuda() && type && *type != ElementType::kDouble;
}

// Whether dimension 1 is the innermost.
bool is_channels_last(const at::Tensor& tensor) {
  int64_t stride = 1;
  const auto steps = [&](int64_t d) {
    const bool fits = tensor.size(d) == 1 || tensor.stride(d) == stride;
    stride *= tensor.size(d);
    return fits;
  };
  bool all = steps(1);
  for (int64_t d = tensor.dim() - 1; d > 1; --d) {
    all = all && steps(d);
  }
  return all && steps(0);
}

// The tensors in the order in which the kernels read them.
struct NormOperands {
  at::Tensor x, g;
  NormInput input;
  bool channels_last;
};

NormOperands row_operands(const LayerCall& call, bool reduces) {
  NormOperands operands{call.input.contiguous(), call.output_gradient.contiguous(), {}, true};
  const int64_t channels = channels_of(call), rows = operands.x.numel() / channels;
  const bool has_samples = call.input.dim() > call.settings[kNormalizedDims];
  const int64_t samples = has_samples ? call.input.size(0) : 1;
  NormInput& input = operands.input;
  input.squares = !reduces || rows == samples;
  input.samples = input.squares ? 1 : samples;
  input.positions = rows / input.samples;
  input.channels = static_cast<int>(channels);
  return operands;
}

NormOperands channel_operands(const LayerCall& call, bool reduces) {
  NormOperands operands{call.input, call.output_gradient, {}, false};
  auto& [x, g, input, channels_last] = operands;
  input.samples = x.size(0);
  input.channels = static_cast<int>(x.size(1));
  input.positions = x.numel() / (input.samples * input.channels);
  input.squares = !reduces || input.positions == 1;
  channels_last = is_channels_last(x) && (input.positions == 1 || !x.is_contiguous());
  if (!channels_last) {
    x = x.contiguous();
    g = g.contiguous();
    return operands;
  }
  if (!is_channels_last(g)) {
    g = g.movedim(1, -1).contiguous();
  }
  if (input.squares && call.kind == LayerKind::kBatchNorm) {
    input.positions *= std::exchange(input.samples, 1);
  }
  return operands;
}

// What x is normalised by, and the memory for it until the launch.
class Statistics {
 public:
  Statistics(const LayerCall& call, int64_t samples, const at::TensorOptions& options)
      : kind_(is_normed_by_rows(call)              ? NormStatistics::kOfRows
              : call.kind == LayerKind::kGroupNorm ? NormStatistics::kOfGroups
              : call.mean.defined()                ? NormStatistics::kGiven
                                                   : NormStatistics::kOfBatch) {
    if (kind_ == NormStatistics::kOfGroups) {
      of_groups_ = at::empty({samples, call.settings[kNumGroups], 2}, options.dtype(at::kDouble));
    } else if (kind_ == NormStatistics::kGiven) {
      mean_ = call.mean.contiguous();
      variance_ = call.variance.contiguous();
    }
  }

  void set(NormBlocks& arguments) const {
    arguments.statistics = kind_;
    if (of_groups_.defined()) {
      arguments.groups = static_cast<int>(of_groups_.size(1));
      arguments.of_groups = of_groups_.mutable_data_ptr<double>();
    } else if (mean_.defined()) {
      arguments.mean = mean_.const_data_ptr();
      arguments.variance = variance_.const_data_ptr();
      arguments.mean_type = *type_of(mean_);
      arguments.variance_type = *type_of(variance_);
    }
  }

 private:
  NormStatistics kind_;
  at::Tensor of_groups_, mean_, variance_;
};

float* floats(const at::Tensor& tensor) { return tensor.mutable_data_ptr<float>(); }

}  // namespace

bool has_norm_kernels(const at::Tensor& blocks, const LayerCall& call) {
  const auto is_readable = [](const at::Tensor& statistic) {
    return !statistic.defined() || (statistic.is_cuda() && type_of(statistic));
  };
  const int64_t channels = channels_of(call);
  const bool fits = is_normed_by_rows(call) ? channels <= cuda_kernels::kMostRowChannels
                                            : call.input.size(0) < kMostSamples;
  return fits && channels < kMostSamples && call.input.numel() < kMostElements &&
         blocks.is_cuda() && blocks.scalar_type() == at::kFloat && blocks.is_contiguous() &&
         has_known_type(call.input) && has_known_type(call.output_gradient) &&
         is_readable(call.mean) && is_readable(call.variance);
}

void store_norm_blocks(at::Tensor& blocks, const LayerCall& call, WeightSharing sharing,
                       bool accumulate) {
  torchium::detail::check_device_code(blocks.device());
  const c10::cuda::CUDAGuard guard(blocks.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const bool by_rows = is_normed_by_rows(call);
  const bool reduces = sharing == WeightSharing::kReduce;
  const auto [x, g, sizes, channels_last] =
      by_rows ? row_operands(call, reduces) : channel_operands(call, reduces);
  NormInput input = sizes;
  input.x = x.const_data_ptr();
  input.g = g.const_data_ptr();
  input.x_type = *type_of(x);
  input.g_type = *type_of(g);
  NormParts parts;
  C10_CUDA_CHECK(by_rows ? cuda_kernels::plan_row_moments(input, parts)
                         : cuda_kernels::plan_channel_moments(input, channels_last, parts));
  const int planes = by_rows ? cuda_kernels::kRowPlanes : cuda_kernels::kChannelPlanes;
  const at::Tensor sums =
      at::empty({input.samples * parts.per_sample * planes * input.channels}, blocks.options());
  const double eps = eps_of_norm(call);
  C10_CUDA_CHECK(
      by_rows ? cuda_kernels::row_moments(input, {call.kind == LayerKind::kLayerNorm, eps}, parts,
                                          floats(sums), stream)
              : cuda_kernels::channel_moments(input, channels_last, parts, floats(sums), stream));
  NormBlocks arguments{};
  arguments.input = input;
  arguments.parts = parts;
  arguments.sums = floats(sums);
  arguments.eps = eps;
  arguments.blocks = floats(blocks);
  arguments.order = static_cast<int>(blocks.size(-1));
  arguments.accumulate = accumulate;
  const Statistics statistics(call, input.samples, blocks.options());
  statistics.set(arguments);
  C10_CUDA_CHECK(cuda_kernels::norm_blocks(arguments, stream));
  blocks.unsafeGetTensorImpl()->bump_version();
}

#else

bool has_norm_kernels(const at::Tensor&, const LayerCall&) { return false; }
void store_norm_blocks(at::Tensor&, const LayerCall&, WeightSharing, bool) {
  TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}
#endif

}  // namespace torchium::gradients::detail
