#ifdef TORCHIUM_WITH_CUDA
#include "optim/shampoo/cuda/parameter_entries.h"

#include "optim/core/cuda/kernel_tensors.h"

#include <algorithm>
#include <limits>

namespace torchium::optim::detail {
namespace {

using cuda_kernels::Direction;

// ParameterEntry::inner; 0 for a layout that the kernels do not know.
int64_t inner_dimension(const at::Tensor& param, const Blocking& blocking, bool merge_dims) {
  if (param.is_contiguous()) {
    return 1;
  }
  if (merge_dims && param.dim() == 4 && blocking.order() <= 2 &&
      param.is_contiguous(at::MemoryFormat::ChannelsLast)) {
    return param.size(2) * param.size(3);
  }
  return 0;
}

Direction direction(ParameterRule rule) {
  switch (rule) {
    case ParameterRule::kMatrices:
      return Direction::kMatrices;
    case ParameterRule::kDiagonal:
      return Direction::kDiagonal;
    default:
      return Direction::kGrafted;
  }
}

}  // namespace

std::array<const at::Tensor*, 4> elementwise_state(const ParameterState& state) {
  return {&state.exp_avg, &state.grafting_second_moment, &state.momentum_buffer, &state.diagonal};
}

bool has_entry(const ShampooHyperparameters& h, const ShampooGroup& group, size_t i) {
  const at::Tensor& param = group.params[i];
  const Blocking& blocking = group.blockings[i];
  const auto tensors = elementwise_state(group.states[i]);
  // The blocks of a diagonal are counted in the contiguous order.
  const bool in_order =
      param.is_contiguous() || blocking.order() == 1 || group.rules[i] != ParameterRule::kDiagonal;
  return blocking.order() <= 2 && in_order && state_dtype(param) == at::kFloat &&
         param.numel() < std::numeric_limits<int>::max() &&
         inner_dimension(param, blocking, h.merge_dims) != 0 &&
         std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor* tensor) {
           return !tensor->defined() || same_layout(*tensor, param);
         });
}

void fill_entry(cuda_kernels::ParameterEntry& entry, const ShampooHyperparameters& h,
                const ShampooGroup& group, size_t i) {
  const at::Tensor& param = group.params[i];
  const Blocking& blocking = group.blockings[i];
  const ParameterState& state = group.states[i];
  entry.direction = direction(group.rules[i]);
  // The blocks of a diagonal, which grafting gives their norms, are those of the flat parameter.
  const bool is_matrix = blocking.order() == 2 && entry.direction != Direction::kDiagonal;
  const int block_size = kernel_block_size(h);
  entry.param = param.mutable_data_ptr();
  entry.exp_avg = floats(state.exp_avg);
  entry.second_moment = floats(state.grafting_second_moment);
  entry.momentum_buffer = floats(state.momentum_buffer);
  entry.diagonal = floats(state.diagonal);
  entry.rows = is_matrix ? static_cast<int>(blocking.dims[0]) : 1;
  entry.columns = static_cast<int>(param.numel() / entry.rows);
  entry.inner = static_cast<int>(inner_dimension(param, blocking, h.merge_dims));
  entry.index = static_cast<int>(i);
  entry.param_type = element_type(param.scalar_type());
  const auto tensors = elementwise_state(state);
  entry.by_fours = entry.inner == 1 && entry.columns % 4 == 0 &&
                   (entry.columns <= block_size || block_size % 4 == 0) && aligned_to_four(param) &&
                   std::all_of(tensors.begin(), tensors.end(),
                               [](const at::Tensor* tensor) { return aligned_to_four(*tensor); });
}

void set_gradient(cuda_kernels::ParameterEntry& entry, const at::Tensor& grad, bool by_fours) {
  entry.grad = grad.const_data_ptr();
  entry.grad_type = element_type(grad.scalar_type());
  entry.by_fours = by_fours && aligned_to_four(grad);
}

int kernel_block_size(const ShampooHyperparameters& h) {
  return static_cast<int>(std::min<int64_t>(h.block_size, 1 << 30));
}

cuda_kernels::ElementRule element_rule(const ShampooHyperparameters& h) {
  return {.block_size = kernel_block_size(h),
          .maximize = h.maximize,
          .weight_decay = static_cast<float>(h.l2_penalty()),
          .decoupled_weight_decay =
              h.decoupled_weight_decay ? static_cast<float>(h.weight_decay) : 0.0f,
          .beta1 = static_cast<float>(h.beta1),
          .moment_beta = h.grafting == "adagrad" ? 1.0f : static_cast<float>(h.grafting_beta2),
          .diagonal_beta = static_cast<float>(h.beta2),
          .grafting_eps = static_cast<float>(h.grafting_eps),
          .diagonal_eps = static_cast<float>(h.eps),
          .momentum = static_cast<float>(h.momentum),
          .nesterov = h.nesterov,
          .grafting = h.grafting.has_value()};
}

}  // namespace torchium::optim::detail
#endif
