#ifdef TORCHIUM_WITH_CUDA
#include "optim/step_stacks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

namespace torchium::optim::detail {
namespace {

using linalg::detail::StackOperand;

constexpr int64_t kAlignment = 32;  // elements

__half* halves(const at::Tensor& tensor) {
  return tensor.defined() ? reinterpret_cast<__half*>(tensor.mutable_data_ptr<at::Half>())
                          : nullptr;
}

// The address of element 0 of a stack that begins at `origin`.
float* from_zero(const at::Tensor& stack, int64_t origin) {
  return stack.defined() ? stack.mutable_data_ptr<float>() - origin : nullptr;
}

}  // namespace

StepStacks::StepStacks(const std::vector<MatrixBatch>& batches, const std::vector<bool>& serves,
                       int64_t block_size, linalg::detail::MatmulPrecision precision,
                       at::TensorOptions options, bool has_average)
    : batches_(batches),
      block_size_(block_size),
      precision_(precision),
      options_(options),
      has_average_(has_average),
      places_(batches.size()) {
  find_places(serves);
}

void StepStacks::find_places(const std::vector<bool>& serves) {
  for (const bool of_halves : {true, false}) {
    for (size_t b = 0; b < batches_.size(); ++b) {
      const MatrixBatch& batch = batches_[b];
      if (!serves[batch.entries.front().param]) {
        continue;
      }
      const auto& sizes = batch.sizes;
      const int64_t elements = batch.count * c10::multiply_integers(sizes);
      if (of_halves == (sizes.size() == 2 &&
                        linalg::detail::use_halves(elements * (sizes[0] + sizes[1]), precision_))) {
        places_[b] = {end_, of_halves};
        end_ += (elements + kAlignment - 1) / kAlignment * kAlignment;
      }
    }
    end_of_halves_ = of_halves ? end_ : end_of_halves_;
  }
}

void StepStacks::place(std::vector<cuda_kernels::ParameterEntry>& entries) const {
  for (size_t b = 0; b < batches_.size(); ++b) {
    const auto& sizes = batches_[b].sizes;
    const int64_t block = c10::multiply_integers(sizes);
    const bool one_row = sizes.size() == 1;
    const bool short_row = one_row ? block_size_ > 1 : sizes[0] != block_size_;
    const int kind = 2 * short_row + (sizes.back() != block_size_);
    for (const auto& [param, shape, start] : batches_[b].entries) {
      entries[param].stacks[kind] = places_[b].first + start * block;
      entries[param].in_halves |= places_[b].of_halves << kind;
    }
  }
}

void StepStacks::set_aside(const at::Tensor& gradient_scale, const at::Tensor& average_scale) {
  const auto set_aside_halves = [&](StackOperand& stacks, const at::Tensor& scale) {
    const auto as_halves = options_.dtype(at::kHalf);
    stacks.high = at::empty({end_of_halves_}, as_halves);
    if (precision_ == linalg::detail::MatmulPrecision::kHighest) {
      stacks.low = at::empty({end_of_halves_}, as_halves);
    }
    stacks.scale = scale;
  };
  gradients_ = at::empty({end_ - end_of_halves_}, options_);
  set_aside_halves(gradient_halves_, gradient_scale);
  if (has_average_) {
    averages_ = at::empty_like(gradients_);
    set_aside_halves(average_halves_, average_scale);
  }
}

void StepStacks::set_aside_directions() {
  if (!directions_.defined()) {
    directions_ = at::empty({end_}, options_);
  }
}

at::Tensor StepStacks::part(size_t b, const at::Tensor& stack, int64_t origin, int64_t start,
                            int64_t count) const {
  const auto& sizes = batches_[b].sizes;
  const int64_t rows = sizes[0], columns = sizes.size() == 1 ? 1 : sizes[1];
  const int64_t block = rows * columns;
  return stack.narrow(0, places_[b].first - origin + start * block, count * block)
      .view({count, rows, columns});
}

StackOperand StepStacks::operand(size_t b, const at::Tensor& floats, const StackOperand& halves,
                                 int64_t start, int64_t count) const {
  if (!is_of_halves(b)) {
    return {part(b, floats, end_of_halves_, start, count), {}, {}};
  }
  return {part(b, halves.high, 0, start, count),
          halves.low.defined() ? part(b, halves.low, 0, start, count) : at::Tensor(), halves.scale};
}

StackOperand StepStacks::gradient(size_t b) const {
  return operand(b, gradients_, gradient_halves_, 0, batches_[b].count);
}

StackOperand StepStacks::average(size_t b, int64_t start, int64_t count) const {
  return has_average_ ? operand(b, averages_, average_halves_, start, count)
                      : operand(b, gradients_, gradient_halves_, start, count);
}

at::Tensor StepStacks::direction(size_t b, int64_t start, int64_t count) const {
  return part(b, directions_, 0, start, count);
}

void StepStacks::fill(cuda_kernels::StepBuffers& buffers) const {
  buffers.gradients = from_zero(gradients_, end_of_halves_);
  buffers.averages = from_zero(averages_, end_of_halves_);
  buffers.gradients_hi = halves(gradient_halves_.high);
  buffers.gradients_lo = halves(gradient_halves_.low);
  buffers.averages_hi = halves(average_halves_.high);
  buffers.averages_lo = halves(average_halves_.low);
  buffers.directions = from_zero(directions_, 0);
}

}  // namespace torchium::optim::detail
#endif
