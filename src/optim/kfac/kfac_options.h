// The list of the options of K-FAC.
#pragma once

#include "optim/core/options.h"
#include "torchium/optim/kfac.h"

namespace torchium::optim {

constexpr auto kWeightSharings = detail::one_of("expand", "reduce");
constexpr auto kFishers = detail::one_of("empirical", "mc", "ggn");

template <typename Options>
requires std::is_same_v<std::remove_const_t<Options>, KFACOptions>
auto option_fields(Options& o) {
  using namespace detail;
  // clang-format off
  return std::make_tuple(
      Option{"lr", o.lr(), kLearningRate},
      Option{"momentum", o.momentum(), kRate},
      Option{"weight_decay", o.weight_decay(), Number{}},
      Option{"damping", o.damping(), Number{}, kScheduled},
      Option{"TCov", o.TCov(), Integer{}, kScheduled},
      Option{"TInv", o.TInv(), Integer{}, kScheduled},
      Option{"batch_averaged", o.batch_averaged(), Flag{}, kSameInAllGroups},
      Option{"eps", o.eps(), Number{}},
      Option{"stat_decay", o.stat_decay(), kRateOrOne, kScheduled},
      Option{"kl_clip", o.kl_clip(), kPositive, kSameInAllGroups | kScheduled},
      Option{"damping_split", o.damping_split(), kDampingSplits, kSameInAllGroups},
      Option{"root_method", o.root_method(), kRootMethods, kSameInAllGroups},
      Option{"fisher", o.fisher(), kFishers, kSameInAllGroups},
      Option{"weight_sharing", o.weight_sharing(), kWeightSharings},
      Option{"max_factor_size", o.max_factor_size(), Integer{}},
      Option{"adaptive_damping", o.adaptive_damping(), Flag{}, kSameInAllGroups},
      Option{"maximize", o.maximize(), Flag{}});
  // clang-format on
}

inline void check_combination(const KFACOptions& o) {
  TORCH_CHECK_VALUE(o.root_method() != "newton" || o.damping_split() != "exact",
                    "root_method='newton' has no eigenvectors, which damping_split='exact' needs; "
                    "use 'eigh' or 'auto'");
  TORCH_CHECK_VALUE(!o.adaptive_damping() || o.momentum() == 0.0,
                    "adaptive_damping=True compares steps without momentum; use momentum=0, got ",
                    detail::text_of(o.momentum()));
}

}  // namespace torchium::optim
