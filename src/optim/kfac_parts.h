// What the sources of KFAC share.
#pragma once

#include "torchium/optim/kfac.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_set>

namespace torchium::optim {

// What is not state: it is found out again after a load.
struct KFAC::Notes {
  std::unordered_set<const at::TensorImpl*> with_factors;  // as far as the host knows
  std::unordered_set<const at::TensorImpl*> fallback;      // in their last step
  std::unordered_set<const at::TensorImpl*> warned;
};

namespace detail {

// Throws c10::ValueError for options of another optimizer.
const KFACOptions& kfac_options(const torch::optim::OptimizerOptions& options);

struct FactorLayer;

// Creates the factors of a weight that has none.
void add_factors(KFACParamState& state, const at::Tensor& weight, const FactorLayer& layer,
                 const std::string& damping_split);

}  // namespace detail
}  // namespace torchium::optim
