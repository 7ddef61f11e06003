#ifdef TORCHIUM_WITH_CUDA
#include "optim/blocked/cuda/block_workspace.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

namespace torchium::optim::detail {
namespace {

using cuda_kernels::SplitFp16;
using linalg::detail::MatmulPrecision;

constexpr int64_t kAlignment = 32;  // elements

__half* split_part(const at::Tensor& parts, int64_t part) {
  return parts.defined() && part < parts.size(0)
             ? reinterpret_cast<__half*>(parts.mutable_data_ptr<at::Half>()) + part * parts.size(1)
             : nullptr;
}

// The address of element 0 of a buffer that begins at `origin`.
float* from_zero(const at::Tensor& buffer, int64_t origin) {
  return buffer.defined() ? buffer.mutable_data_ptr<float>() - origin : nullptr;
}

// Matrices that other code put into the state may lie anywhere and have any dtype.
bool can_be_read_by_vectors(const at::Tensor& buffer) {
  constexpr uintptr_t kVector = 16;  // bytes that kernels read at once
  const auto type = buffer.scalar_type();
  return (type == at::kFloat || type == at::kBFloat16) &&
         reinterpret_cast<uintptr_t>(buffer.const_data_ptr()) % kVector == 0;
}

bool fits_kernel(const MatrixBatch& batch) {
  const auto& sizes = batch.sizes;
  return sizes.size() == 2 && cuda_kernels::fits_batched_product(sizes[0], sizes[1]) &&
         std::all_of(batch.statistics.begin(), batch.statistics.end(), can_be_read_by_vectors) &&
         std::all_of(batch.roots.begin(), batch.roots.end(), can_be_read_by_vectors);
}

bool has_split_products(const at::Device& device) {
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(device.index());
  return cuda_kernels::has_batched_product(properties->major, properties->minor,
                                           static_cast<int>(properties->sharedMemPerBlockOptin));
}

}  // namespace

BlockWorkspace::BlockWorkspace(std::span<const MatrixBatch> batches, int64_t block_size,
                               at::TensorOptions options, bool has_average)
    : batches_(batches),
      block_size_(block_size),
      options_(options),
      has_average_(has_average),
      places_(batches.size()) {
  const bool has_kernel = has_split_products(options_.device());
  for (const bool is_split : {true, false}) {
    for (size_t b = 0; b < batches_.size(); ++b) {
      if ((has_kernel && fits_kernel(batches_[b])) == is_split) {
        places_[b] = {end_, split_matrices_, is_split};
        split_matrices_ += is_split ? batches_[b].count : 0;
        const int64_t elements = batches_[b].count * c10::multiply_integers(batches_[b].sizes);
        end_ += (elements + kAlignment - 1) / kAlignment * kAlignment;
      }
    }
    split_end_ = is_split ? end_ : split_end_;
  }
}

void BlockWorkspace::place(std::vector<cuda_kernels::ParameterEntry>& entries) const {
  for (size_t b = 0; b < batches_.size(); ++b) {
    const auto& sizes = batches_[b].sizes;
    const int64_t block = c10::multiply_integers(sizes);
    const bool one_row = sizes.size() == 1;
    const bool short_row = one_row ? block_size_ > 1 : sizes[0] != block_size_;
    const int kind = 2 * short_row + (sizes.back() != block_size_);
    for (const auto& [param, shape, start] : batches_[b].entries) {
      entries[param].blocks[kind] = places_[b].first + start * block;
      entries[param].matrices[kind] = static_cast<int>(places_[b].first_matrix + start);
      entries[param].in_fp16 |= places_[b].is_split << kind;
    }
  }
}

void BlockWorkspace::set_aside(MatmulPrecision precision) {
  const auto in_fp16 = options_.dtype(at::kHalf);
  const int64_t parts = precision == MatmulPrecision::kHighest ? 2 : 1;
  gradients_ = at::empty({end_ - split_end_}, options_);
  split_gradients_ = at::empty({parts, split_end_}, in_fp16);
  gradient_scales_ = at::empty({split_matrices_}, options_);
  if (has_average_) {
    average_scales_ = at::empty_like(gradient_scales_);
    averages_ = at::empty_like(gradients_);
    split_averages_ = at::empty_like(split_gradients_);
  }
}

void BlockWorkspace::set_aside_directions() { directions_ = at::empty({end_}, options_); }

void BlockWorkspace::free_all() {
  gradients_ = averages_ = directions_ = split_gradients_ = split_averages_ = at::Tensor();
  gradient_scales_ = average_scales_ = at::Tensor();
}

at::Tensor BlockWorkspace::part(size_t b, const at::Tensor& buffer, int64_t origin) const {
  const auto& batch = batches_[b];
  const int64_t rows = batch.sizes[0], columns = batch.sizes.size() == 1 ? 1 : batch.sizes[1];
  return buffer.narrow(0, places_[b].first - origin, batch.count * rows * columns)
      .view({batch.count, rows, columns});
}

at::Tensor BlockWorkspace::gradient(size_t b) const { return part(b, gradients_, split_end_); }

at::Tensor BlockWorkspace::average(size_t b) const {
  return part(b, has_average_ ? averages_ : gradients_, split_end_);
}

at::Tensor BlockWorkspace::direction(size_t b) const { return part(b, directions_, 0); }

float* BlockWorkspace::direction_floats(size_t b, int64_t start) const {
  const int64_t first = places_[b].first + start * c10::multiply_integers(batches_[b].sizes);
  return directions_.mutable_data_ptr<float>() + first;
}

SplitFp16 BlockWorkspace::split(const at::Tensor& storage, const at::Tensor& scales, size_t b,
                                int64_t start) const {
  const auto& sizes = batches_[b].sizes;
  const int64_t first = places_[b].first + start * c10::multiply_integers(sizes);
  __half* low = split_part(storage, 1);
  return {.hi = split_part(storage, 0) + first,
          .lo = low == nullptr ? nullptr : low + first,
          .scale = scales.mutable_data_ptr<float>() + places_[b].first_matrix + start,
          .rows = static_cast<int>(sizes[0]),
          .columns = static_cast<int>(sizes[1]),
          .has_scales = true};
}

SplitFp16 BlockWorkspace::split_gradient(size_t b) const {
  return split(split_gradients_, gradient_scales_, b, 0);
}

SplitFp16 BlockWorkspace::split_average(size_t b, int64_t start) const {
  return has_average_ ? split(split_averages_, average_scales_, b, start)
                      : split(split_gradients_, gradient_scales_, b, start);
}

void BlockWorkspace::fill(cuda_kernels::StepBuffers& buffers) const {
  buffers.gradients = from_zero(gradients_, split_end_);
  buffers.averages = from_zero(averages_, split_end_);
  buffers.gradients_hi = split_part(split_gradients_, 0);
  buffers.gradients_lo = split_part(split_gradients_, 1);
  buffers.averages_hi = split_part(split_averages_, 0);
  buffers.averages_lo = split_part(split_averages_, 1);
  buffers.gradient_scales = from_zero(gradient_scales_, 0);
  buffers.average_scales = from_zero(average_scales_, 0);
  buffers.directions = from_zero(directions_, 0);
}

}  // namespace torchium::optim::detail
#endif
