#include "optim/adagrad/cuda/fused_adagrad.h"

#include "optim/adagrad/adagrad_step.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/optimizer_step/adagrad_step.h"
#include "optim/core/cuda/device_check.h"
#include "optim/shampoo/cuda/parameter_entries.h"
#include "support/device_code.h"

#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>
#endif

namespace torchium::optim::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

using cuda_kernels::AdagradEntry;

constexpr size_t kNoEntry = std::numeric_limits<size_t>::max();

class AdagradKernels : public FusedAdagrad {
 public:
  AdagradKernels(const AdagradHyperparameters& h, const std::vector<at::Tensor>& params,
                 const AdagradState& state)
      : params_(params), sums_(state.sums), status_(state.status), check_(params[0].options()) {
    for (size_t i = 0; i < params_.size(); ++i) {
      check_.add_parameter(params_[i], h.weight_decay, state.steps[i]);
      const int64_t elements = params_[i].numel();
      by_fours_.push_back(aligned_to_four(params_[i]) && aligned_to_four(sums_[i]));
      const AdagradEntry entry{.param = params_[i].mutable_data_ptr(),
                               .grad = nullptr,
                               .sum = sums_[i].mutable_data_ptr<float>(),
                               .step = state.steps[i].const_data_ptr<double>(),
                               .elements = elements,
                               .first_tile = 0,
                               .param_type = element_type(params_[i].scalar_type()),
                               .grad_type = cuda_kernels::ElementType::kFloat,
                               .by_fours = false};
      const int64_t tiles =
          (elements + cuda_kernels::kAdagradTile - 1) / cuda_kernels::kAdagradTile;
      entries_.push_back(tiles == 0 ? kNoEntry : tables_.add(entry, static_cast<int>(tiles)));
    }
  }

  void run(const AdagradHyperparameters& h, const at::Tensor& lr, at::TensorList grads,
           const at::Tensor& found_inf) override {
    const c10::DeviceGuard device_guard(params_[0].device());
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    std::vector<at::Tensor> readable;  // lives until the kernels are launched
    for (size_t i = 0; i < params_.size(); ++i) {
      readable.push_back(readable_gradient(grads[i], params_[i], /*is_supported=*/true));
      set_gradient(i, readable.back());
    }
    check_.run({.beta1 = 1.0, .moment_beta = 1.0, .beta2 = 1.0, .start = 1.0, .weight_decay = 0.0},
               status_, stream, found_inf);
    const cuda_kernels::AdagradRule rule{.maximize = h.maximize,
                                         .weight_decay = static_cast<float>(h.weight_decay),
                                         .eps = static_cast<float>(h.eps),
                                         .lr_decay = h.lr_decay};
    const at::Tensor rate = readable_learning_rate(lr);
    for (const auto& table : tables_) {
      C10_CUDA_CHECK(cuda_kernels::update_by_adagrad(rule, table, check_.control(),
                                                     learning_rate(rate), stream));
    }
    for (size_t i = 0; i < params_.size(); ++i) {
      note_change(params_[i]);
      note_change(sums_[i]);
    }
    check_.end();
  }

 private:
  void set_gradient(size_t i, const at::Tensor& grad) {
    check_.set_gradient(i, grad);
    if (entries_[i] != kNoEntry) {
      AdagradEntry& entry = tables_[entries_[i]];
      entry.grad = grad.const_data_ptr();
      entry.grad_type = element_type(grad.scalar_type());
      entry.by_fours = by_fours_[i] && aligned_to_four(grad);
    }
  }

  std::vector<at::Tensor> params_, sums_;
  at::Tensor status_;
  DeviceCheck check_;
  KernelTables<AdagradEntry> tables_;
  std::vector<size_t> entries_;  // in the tables
  std::vector<bool> by_fours_;   // of each entry, whatever the gradient
};

}  // namespace

std::unique_ptr<FusedAdagrad> FusedAdagrad::plan(const AdagradHyperparameters& h,
                                                 const std::vector<at::Tensor>& params,
                                                 const AdagradState& state) {
  if (h.full_matrix || !params[0].is_cuda()) {
    return nullptr;
  }
  for (size_t i = 0; i < params.size(); ++i) {
    if (state_dtype(params[i]) != at::kFloat || !params[i].is_non_overlapping_and_dense() ||
        !same_layout(state.sums[i], params[i])) {
      return nullptr;
    }
  }
  const c10::DeviceGuard device_guard(params[0].device());
  torchium::detail::check_device_code(params[0].device());
  return std::make_unique<AdagradKernels>(h, params, state);
}

#else

std::unique_ptr<FusedAdagrad> FusedAdagrad::plan(const AdagradHyperparameters&,
                                                 const std::vector<at::Tensor>&,
                                                 const AdagradState&) {
  return nullptr;
}
#endif

}  // namespace torchium::optim::detail
