// Updates of the factors of all layers, and of the blocks of all norms, in two launches. CUDA
// builds only.
#pragma once

#include "cuda_kernels/optimizer_step/kfac_step.h"
#include "optim/core/cuda/kernel_tables.h"
#include "optim/kfac/kfac_subset.h"

#include <cstddef>
#include <vector>

namespace torchium::optim::detail {

// Keeps the tables of the kernels from step to step.
class FactorUpdates {
 public:
  // For the layers and norms of these members of the group, which must outlive this object.
  FactorUpdates(const KfacGroup& group, const KfacMembers& members);

  // Of the layers with sums, unless `control` skips the step.
  void run(const cuda_kernels::StepControl* control);

 private:
  struct Place {
    size_t layer;
    size_t A, G;  // entries
  };
  struct NormPlace {
    size_t norm, blocks;
  };

  bool set_sums();

  const KfacGroup& group_;
  std::vector<Place> places_;
  std::vector<NormPlace> norm_places_;
  KernelTables<cuda_kernels::FactorEntry> tables_;
};

}  // namespace torchium::optim::detail
