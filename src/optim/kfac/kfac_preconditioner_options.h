// The list of the options of KFACPreconditioner.
#pragma once

#include "optim/kfac/kfac_options.h"
#include "torchium/optim/kfac_preconditioner.h"

namespace torchium::optim {

template <typename Options>
requires std::is_same_v<std::remove_const_t<Options>, KFACPreconditionerOptions>
auto option_fields(Options& o) {
  using namespace detail;
  // clang-format off
  return std::make_tuple(
      Option{"lr", o.lr(), kLearningRate, kScheduled},
      Option{"factor_update_steps", o.factor_update_steps(), Integer{}, kScheduled},
      Option{"inv_update_steps", o.inv_update_steps(), Integer{}, kScheduled},
      Option{"damping", o.damping(), Number{}, kScheduled},
      Option{"factor_decay", o.factor_decay(), kRateOrOne, kScheduled},
      Option{"kl_clip", o.kl_clip(), kPositive, kSameInAllGroups | kScheduled},
      Option{"batch_averaged", o.batch_averaged(), Flag{}, kSameInAllGroups},
      Option{"eps", o.eps(), Number{}},
      Option{"damping_split", o.damping_split(), kDampingSplits, kSameInAllGroups},
      Option{"ekfac", o.ekfac(), Flag{}, kSameInAllGroups},
      Option{"solver", o.solver(), kKfacSolvers, kSameInAllGroups},
      Option{"structures", o.structures(), kStructures},
      Option{"block_size", o.block_size(), Integer{.low = 2}},
      Option{"alpha1", o.alpha1(), kRate},
      Option{"fisher", o.fisher(), kFishers, kSameInAllGroups},
      Option{"weight_sharing", o.weight_sharing(), kWeightSharings},
      Option{"max_factor_size", o.max_factor_size(), Integer{}},
      Option{"factor_dtype", o.factor_dtype(), kFactorDtypes});
  // clang-format on
}

// Those of the KFAC whose directions it takes.
KFACOptions kfac_options(const KFACPreconditionerOptions& options);

inline void check_combination(const KFACPreconditionerOptions& o) {
  const KFACOptions options = kfac_options(o);
  check_inverse_free(options, "inv_update_steps");
  check_combination(options);
}

}  // namespace torchium::optim
