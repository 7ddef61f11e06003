#include "gradients/jacobian/device_sums.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/samples/outer_rows.h"
#include "cuda_kernels/samples/sample_norms.h"
#include "support/device_code.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <limits>

namespace torchium::gradients::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

// [n, *shape] -> [n, size], rows of which the elements are contiguous.
at::Tensor as_rows(const at::Tensor& x) {
  const at::Tensor rows = x.dim() == 2 ? x : x.unsqueeze(-1).flatten(1);
  return rows.size(1) > 1 && rows.stride(1) != 1 ? rows.contiguous() : rows;
}

cuda_kernels::SamplePair pair_of(const at::Tensor& A, const at::Tensor& G, double weight,
                                 double bias_weight) {
  cuda_kernels::SamplePair pair{.G = G.const_data_ptr<float>(),
                                .G_pitch = G.stride(0),
                                .fan_out = static_cast<int>(G.size(1)),
                                .weight = weight,
                                .bias_weight = bias_weight};
  if (A.defined()) {
    pair.A = A.const_data_ptr<float>();
    pair.A_pitch = A.stride(0);
    pair.fan_in = static_cast<int>(A.size(1));
  }
  return pair;
}

}  // namespace

bool store_outer_rows(const VectorPairs& pairs, const at::Tensor& w, const at::Tensor& rows) {
  const int64_t of_sample = pairs.A.size(1) * pairs.G.size(1);
  if (!rows.is_cuda() || rows.scalar_type() != at::kFloat || pairs.A.scalar_type() != at::kFloat ||
      pairs.G.scalar_type() != at::kFloat || of_sample > std::numeric_limits<int>::max() / 2) {
    return false;
  }
  torchium::detail::check_device_code(rows.device());
  const c10::cuda::CUDAGuard guard(rows.device());
  const at::Tensor A = as_rows(pairs.A), G = as_rows(pairs.G);
  const at::Tensor weights = w.defined() ? w.contiguous() : w;
  C10_CUDA_CHECK(cuda_kernels::outer_rows(
      {.pair = pair_of(A, G, 1.0, 0.0),
       .samples = static_cast<int>(rows.size(0)),
       .weights = weights.defined() ? weights.const_data_ptr<float>() : nullptr,
       .rows = rows.mutable_data_ptr<float>()},
      c10::cuda::getCurrentCUDAStream()));
  return true;
}

bool NormSums::is_available(c10::Device device) { return device.is_cuda(); }

at::Tensor NormSums::norms(const at::Tensor& squares, const at::TensorOptions& options,
                           int64_t samples, at::ScalarType dtype) const {
  using cuda_kernels::SampleNorms;
  torchium::detail::check_device_code(options.device());
  const c10::cuda::CUDAGuard guard(options.device());
  at::Tensor sums = squares;
  size_t next = 0;
  do {
    SampleNorms arguments;
    for (; next < terms_.size() && arguments.count < SampleNorms::kMostTerms; ++next) {
      const auto& [A, G, has_bias, tiles] = terms_[next];
      auto& term = arguments.terms[arguments.count++];
      if (G.defined()) {
        term.pair = pair_of(A, G, 1.0, has_bias ? 1.0 : 0.0);
      } else {
        term.squares = {.tiles = tiles.tiles.const_data_ptr<float>(),
                        .scale_A = tiles.scales.const_data_ptr<float>(),
                        .scale_G = tiles.scales.const_data_ptr<float>() + samples,
                        .tiles_of_sample = static_cast<int>(tiles.tiles.size(1)),
                        .factor = tiles.factor};
      }
    }
    const bool is_last = next == terms_.size();
    const at::Tensor result = at::empty({samples}, options.dtype(is_last ? dtype : at::kDouble));
    arguments.samples = samples;
    arguments.squares = sums.defined() ? sums.const_data_ptr<double>() : nullptr;
    arguments.norms = result.mutable_data_ptr();
    arguments.has_float_norms = result.scalar_type() == at::kFloat;
    arguments.has_root = is_last;
    C10_CUDA_CHECK(cuda_kernels::sample_norms(arguments, c10::cuda::getCurrentCUDAStream()));
    sums = result;
  } while (next < terms_.size());
  return sums;
}

bool GramSums::is_available(c10::Device device) {
  return device.is_cuda() &&
         cuda_kernels::has_pair_gram(at::cuda::getDeviceProperties(device.index())->major);
}

at::Tensor GramSums::gram(at::Tensor K, const at::TensorOptions& options, int64_t samples) const {
  using cuda_kernels::PairGram;
  if (terms_.empty()) {
    return K.defined() ? K : at::zeros({samples, samples}, options);
  }
  torchium::detail::check_device_code(options.device());
  const c10::cuda::CUDAGuard guard(options.device());
  const bool is_new = !K.defined();
  if (is_new) {
    K = at::empty({samples, samples}, options);
  }
  for (size_t next = 0; next < terms_.size();) {
    PairGram arguments;
    arguments.beta = is_new && next == 0 ? 0.0 : 1.0;
    for (; next < terms_.size() && arguments.count < PairGram::kMostPairs; ++next) {
      const auto& [A, G, weight, bias_weight] = terms_[next];
      arguments.pairs[arguments.count++] = pair_of(A, G, weight, bias_weight);
    }
    arguments.samples = static_cast<int>(samples);
    arguments.K = K.mutable_data_ptr<double>();
    C10_CUDA_CHECK(cuda_kernels::pair_gram(arguments, c10::cuda::getCurrentCUDAStream()));
  }
  return K;
}

void NormSums::add(const VectorPairs& pairs, bool has_bias) {
  terms_.push_back({as_rows(pairs.A), as_rows(pairs.G), has_bias, {}});
}

void NormSums::add(const at::Tensor& rows) { terms_.push_back({{}, as_rows(rows), true, {}}); }

void GramSums::add(const VectorPairs& pairs, double weight, double bias_weight) {
  terms_.push_back({as_rows(pairs.A), as_rows(pairs.G), weight, bias_weight});
}

void GramSums::add(const at::Tensor& rows, double weight) {
  terms_.push_back({{}, as_rows(rows), 0.0, weight});
}

#else

bool store_outer_rows(const VectorPairs&, const at::Tensor&, const at::Tensor&) { return false; }
bool NormSums::is_available(c10::Device) { return false; }
at::Tensor NormSums::norms(const at::Tensor&, const at::TensorOptions&, int64_t,
                           at::ScalarType) const {
  TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}
void NormSums::add(const VectorPairs&, bool) {}
void NormSums::add(const at::Tensor&) {}
bool GramSums::is_available(c10::Device) { return false; }
at::Tensor GramSums::gram(at::Tensor, const at::TensorOptions&, int64_t) const {
  TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}
void GramSums::add(const VectorPairs&, double, double) {}
void GramSums::add(const at::Tensor&, double) {}

#endif

void NormSums::add(const DeviceRows::Squares& squares) {
  terms_.push_back({{}, {}, false, squares});
}

}  // namespace torchium::gradients::detail
