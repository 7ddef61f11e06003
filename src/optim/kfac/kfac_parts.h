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

// Whether a layer with factors has what `damping_split` makes of them.
bool has_roots(KFACParamState& state, const std::string& damping_split);

// Replaces what another damping_split has made of the factors by that of none yet.
void reset_roots(KFACParamState& state, const at::Tensor& weight, const std::string& damping_split);

// Whether the factors are those of a layer with this weight, as [out, in] or [in, out], with or
// without a bias.
bool factors_fit(const at::Tensor& weight, const at::Tensor& A, const at::Tensor& G);

// The layer that factors may be of: their shapes say the number of groups, whether there is a row
// for a bias and which are diagonals; also which dimension of a weight that is not square is the
// input.
FactorLayer layer_of_factors(const at::Tensor& weight, const at::Tensor& A, const at::Tensor& G);

}  // namespace detail
}  // namespace torchium::optim
