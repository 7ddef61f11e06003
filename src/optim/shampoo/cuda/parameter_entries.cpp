#ifdef TORCHIUM_WITH_CUDA
#include "optim/shampoo/cuda/parameter_entries.h"

#include "optim/blocked/block_storage.h"
#include "optim/shampoo/shampoo_rules.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <limits>

namespace torchium::optim::detail {
namespace {

using cuda_kernels::ElementType;

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

cuda_kernels::Direction direction(ParameterRule rule) {
  switch (rule) {
    case ParameterRule::kMatrices:
      return cuda_kernels::Direction::kMatrices;
    case ParameterRule::kDiagonal:
      return cuda_kernels::Direction::kDiagonal;
    default:
      return cuda_kernels::Direction::kGrafted;
  }
}

float* floats(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr;
}

}  // namespace

bool same_layout(const at::Tensor& tensor, const at::Tensor& param) {
  return (tensor.is_contiguous() && param.is_contiguous()) || tensor.strides() == param.strides();
}

bool aligned_to_four(const at::Tensor& tensor) {
  return !tensor.defined() || reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) %
                                      (4 * static_cast<uintptr_t>(tensor.element_size())) ==
                                  0;
}

void note_change(const at::Tensor& tensor) {
  if (tensor.defined()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

at::Tensor readable_learning_rate(const at::Tensor& lr) {
  return lr.scalar_type() == at::kDouble ? lr : lr.to(at::kFloat);
}

cuda_kernels::LearningRate learning_rate(const at::Tensor& lr) {
  return {lr.is_cpu() ? nullptr : lr.const_data_ptr(), lr.scalar_type() == at::kDouble,
          lr.is_cpu() ? lr.item<double>() : 0.0};
}

ElementType element_type(at::ScalarType type) {
  switch (type) {
    case at::kBFloat16:
      return ElementType::kBFloat16;
    case at::kHalf:
      return ElementType::kHalf;
    case at::kDouble:
      return ElementType::kDouble;
    default:
      return ElementType::kFloat;
  }
}

std::vector<ElementwiseState> elementwise_states(const ShampooHyperparameters& h,
                                                 const std::vector<Blocking>& blockings,
                                                 const ShampooState& state) {
  std::vector<ElementwiseState> all(blockings.size());
  for (size_t i = 0, diagonal = 0; i < blockings.size(); ++i) {
    const bool has_diagonal = parameter_rule(h, blockings[i].dims) == ParameterRule::kDiagonal;
    all[i] = {h.beta1 > 0.0 ? state.exp_avgs[i] : at::Tensor(),
              uses_second_moment(h) ? state.grafting_second_moments[i] : at::Tensor(),
              h.momentum > 0.0 ? state.momentum_buffers[i] : at::Tensor(),
              has_diagonal ? state.diagonals[diagonal++] : at::Tensor()};
  }
  return all;
}

bool is_supported(const ShampooHyperparameters& h, const at::Tensor& param,
                  const Blocking& blocking, const ElementwiseState& state) {
  const auto tensors = state.all();
  // The blocks of a diagonal are counted in the contiguous order.
  const bool in_order = param.is_contiguous() || blocking.order() == 1 ||
                        parameter_rule(h, blocking.dims) != ParameterRule::kDiagonal;
  return blocking.order() <= 2 && in_order && state_dtype(param) == at::kFloat &&
         param.numel() < std::numeric_limits<int>::max() &&
         inner_dimension(param, blocking, h.merge_dims) != 0 &&
         std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor* tensor) {
           return !tensor->defined() || same_layout(*tensor, param);
         });
}

at::Tensor readable_gradient(const at::Tensor& grad, const at::Tensor& param, bool is_supported) {
  const auto type = grad.scalar_type();
  const bool is_16_bit = type == at::kBFloat16 || type == at::kHalf;
  if (!is_supported) {
    return type == at::kFloat || type == at::kDouble || is_16_bit ? grad : grad.to(at::kFloat);
  }
  if ((type == at::kFloat || is_16_bit) && same_layout(grad, param)) {
    return grad;
  }
  return at::empty_like(param, grad.options().dtype(at::kFloat)).copy_(grad);
}

void fill_entry(cuda_kernels::ParameterEntry& entry, const ShampooHyperparameters& h,
                const at::Tensor& param, const Blocking& blocking, const ElementwiseState& state) {
  entry.direction = direction(parameter_rule(h, blocking.dims));
  // The blocks of a diagonal, which grafting gives their norms, are those of the flat parameter.
  const bool is_matrix =
      blocking.order() == 2 && entry.direction != cuda_kernels::Direction::kDiagonal;
  const int block_size = kernel_block_size(h);
  entry.param = param.mutable_data_ptr();
  entry.exp_avg = floats(state.exp_avg);
  entry.second_moment = floats(state.second_moment);
  entry.momentum_buffer = floats(state.momentum_buffer);
  entry.diagonal = floats(state.diagonal);
  entry.rows = is_matrix ? static_cast<int>(blocking.dims[0]) : 1;
  entry.columns = static_cast<int>(param.numel() / entry.rows);
  entry.inner = static_cast<int>(inner_dimension(param, blocking, h.merge_dims));
  entry.param_type = element_type(param.scalar_type());
  const auto tensors = state.all();
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

cuda_kernels::StepRule step_rule(const ShampooHyperparameters& h) {
  return {.beta1 = h.beta1 > 0.0 ? h.beta1 : 1.0,
          .moment_beta = h.grafting == "adam" ? h.grafting_beta2 : 1.0,
          .beta2 = h.beta2,
          .start = static_cast<double>(h.start_preconditioning_step),
          .weight_decay = h.decoupled_weight_decay ? 0.0 : h.weight_decay};
}

cuda_kernels::ElementRule element_rule(const ShampooHyperparameters& h) {
  const auto decay = static_cast<float>(h.weight_decay);
  return {.block_size = kernel_block_size(h),
          .maximize = h.maximize,
          .weight_decay = h.decoupled_weight_decay ? 0.0f : decay,
          .decoupled_weight_decay = h.decoupled_weight_decay ? decay : 0.0f,
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
