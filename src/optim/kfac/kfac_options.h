// The list of the options of K-FAC.
#pragma once

#include "optim/capture/capturing_options.h"
#include "torchium/optim/kfac.h"

#include <vector>

namespace torchium::optim {

constexpr auto kWeightSharings = detail::one_of("expand", "reduce");
constexpr auto kFactorDtypes = detail::one_of("bfloat16", "float32", "float64");
constexpr auto kKfacSolvers = detail::one_of("auto", "eigh", "cholesky", "newton", "inverse_free");
constexpr detail::ChoicePair kStructures{
    detail::one_of("dense", "block_diagonal", "toeplitz", "diagonal")};

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
      Option{"ekfac", o.ekfac(), Flag{}, kSameInAllGroups},
      Option{"solver", o.solver(), kKfacSolvers, kSameInAllGroups},
      Option{"structures", o.structures(), kStructures},
      Option{"block_size", o.block_size(), Integer{.low = 2}},
      Option{"alpha1", o.alpha1(), kRate},
      Option{"fisher", o.fisher(), kFishers, kSameInAllGroups},
      Option{"weight_sharing", o.weight_sharing(), kWeightSharings},
      Option{"max_factor_size", o.max_factor_size(), Integer{}},
      Option{"factor_dtype", o.factor_dtype(), kFactorDtypes},
      Option{"adaptive_damping", o.adaptive_damping(), Flag{}, kSameInAllGroups},
      Option{"maximize", o.maximize(), Flag{}},
      Option{"graphs", o.graphs(), kGraphModes, kSameInAllGroups},
      Option{"capturable", o.capturable(), Flag{}, kSameInAllGroups});
  // clang-format on
}

// Throws c10::ValueError for options without a meaning for solver "inverse_free", or for no other
// one. name_of_TInv: of that option in the caller's list.
void check_inverse_free(const KFACOptions& options, const char* name_of_TInv = "TInv");

// Throws c10::ValueError for a parameter group with a grad_worker_fraction or skip_layers of its
// own.
template <typename Options>
void check_as_in_defaults(const torch::optim::OptimizerOptions& defaults,
                          const std::vector<const torch::optim::OptimizerOptions*>& groups) {
  for (const auto* group : groups) {
    const double own = static_cast<const Options&>(*group).grad_worker_fraction();
    TORCH_CHECK_VALUE(
        own == 1.0 || own == static_cast<const Options&>(defaults).grad_worker_fraction(),
        "grad_worker_fraction of a parameter group differs from that of the optimizer; set it in "
        "the defaults alone");
    const auto& skipped = static_cast<const Options&>(*group).skip_layers();
    TORCH_CHECK_VALUE(
        skipped.empty() || skipped == static_cast<const Options&>(defaults).skip_layers(),
        "skip_layers of a parameter group differs from that of the optimizer; set it in the "
        "defaults alone");
  }
}

void check_combination(const KFACOptions& o);

}  // namespace torchium::optim
