#include "optim/adagrad/cuda/adagrad_kernels.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/optimizer_step/adagrad_step.h"
#include "optim/core/cuda/device_check.h"
#include "optim/core/cuda/kernel_tables.h"
#include "optim/core/cuda/kernel_tensors.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::optim::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

using cuda_kernels::AdagradEntry;

class AdagradKernels : public AdagradSubset {
 public:
  AdagradKernels(const AdagradGroup& group, const std::vector<size_t>& members, DeviceCheck& check)
      : group_(group), check_(check) {
    for (const size_t i : members) {
      const at::Tensor& param = group.params[i];
      const at::Tensor& sum = group.states[i].sum;
      check.set_updated(i);
      const int64_t elements = param.numel();
      if (elements == 0) {
        continue;
      }
      const bool by_fours = aligned_to_four(param) && aligned_to_four(sum);
      const AdagradEntry entry{.param = param.mutable_data_ptr(),
                               .sum = floats(sum),
                               .step = group.states[i].step.const_data_ptr<double>(),
                               .elements = elements,
                               .first_tile = 0,
                               .index = static_cast<int>(i),
                               .param_type = element_type(param.scalar_type()),
                               .grad_type = cuda_kernels::ElementType::kFloat,
                               .by_fours = false};
      const int64_t tiles =
          (elements + cuda_kernels::kAdagradTile - 1) / cuda_kernels::kAdagradTile;
      places_.push_back({i, tables_.add(entry, static_cast<int>(tiles)), by_fours});
    }
  }

  void update(const AdagradRun& run) override {
    for (const TablePlace& place : places_) {
      set_gradient(tables_[place.entry], check_.gradient_kind(place.param), place.by_fours);
    }
    const cuda_kernels::AdagradRule rule{
        .maximize = run.options.maximize(),
        .weight_decay = static_cast<float>(run.options.weight_decay()),
        .eps = static_cast<float>(run.options.eps()),
        .lr_decay = run.options.lr_decay()};
    const at::Tensor lr = readable_learning_rate(run.lr);
    for (const auto& table : tables_) {
      C10_CUDA_CHECK(cuda_kernels::update_by_adagrad(rule, table, check_.control(),
                                                     check_.numbers(), learning_rate(lr),
                                                     c10::cuda::getCurrentCUDAStream()));
    }
    for (const TablePlace& place : places_) {
      note_change(group_.params[place.param]);
      note_change(group_.states[place.param].sum);
    }
  }

 private:
  const AdagradGroup& group_;
  DeviceCheck& check_;
  KernelTables<AdagradEntry> tables_;
  std::vector<TablePlace> places_;  // of parameters that have elements
};

}  // namespace

bool has_adagrad_kernels(const AdagradGroup& group, size_t i) {
  const at::Tensor& param = group.params[i];
  return param.is_cuda() && state_dtype(param) == at::kFloat &&
         param.is_non_overlapping_and_dense() && same_layout(group.states[i].sum, param);
}

std::unique_ptr<AdagradSubset> make_adagrad_kernels(const AdagradGroup& group,
                                                    const std::vector<size_t>& members,
                                                    StepPrologue& prologue) {
  return std::make_unique<AdagradKernels>(group, members, static_cast<DeviceCheck&>(prologue));
}

#else

bool has_adagrad_kernels(const AdagradGroup&, size_t) { return false; }

std::unique_ptr<AdagradSubset> make_adagrad_kernels(const AdagradGroup&, const std::vector<size_t>&,
                                                    StepPrologue&) {
  TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}
#endif

}  // namespace torchium::optim::detail
