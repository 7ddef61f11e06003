// The list of the options of natural gradient.
#pragma once

#include "optim/capture/capturing_options.h"
#include "torchium/optim/natural_gradient.h"

namespace torchium::optim {

template <typename Options>
requires std::is_same_v<std::remove_const_t<Options>, NaturalGradientOptions>
auto option_fields(Options& o) {
  using namespace detail;
  // clang-format off
  return std::make_tuple(
      Option{"lr", o.lr(), kLearningRate},
      Option{"damping", o.damping(), kPositive},
      Option{"update_freq", o.update_freq(), Integer{}, kSameInAllGroups},
      Option{"eps", o.eps(), kPositive, kSameInAllGroups},
      Option{"momentum", o.momentum(), kRate},
      Option{"max_norm", o.max_norm(), kPositive, kSameInAllGroups},
      Option{"solver", o.solver(), one_of("auto", "gram", "explicit", "cg"), kSameInAllGroups},
      Option{"fisher", o.fisher(), kFishers, kSameInAllGroups},
      Option{"nystrom_rank", o.nystrom_rank(), Integer{0}, kSameInAllGroups},
      Option{"max_workspace_bytes", o.max_workspace_bytes(), Integer{}, kSameInAllGroups},
      Option{"adaptive_damping", o.adaptive_damping(), Flag{}, kSameInAllGroups},
      Option{"maximize", o.maximize(), Flag{}},
      Option{"graphs", o.graphs(), kGraphModes, kSameInAllGroups},
      Option{"capturable", o.capturable(), Flag{}, kSameInAllGroups});
  // clang-format on
}

inline void check_combination(const NaturalGradientOptions& o) {
  detail::check_adaptive_damping(o.adaptive_damping(), o.momentum());
  detail::check_capturable(o.capturable(), o.adaptive_damping());
  TORCH_CHECK_VALUE(!o.capturable() || o.update_freq() == 1,
                    "capturable=True captures the matrix of every step; use update_freq=1, got ",
                    o.update_freq());
  TORCH_CHECK_VALUE(!o.capturable() || o.nystrom_rank() == 0,
                    "a CUDA graph cannot capture the Nystrom preconditioner, which takes "
                    "eigenvalues; with capturable=True use nystrom_rank=0, got ",
                    o.nystrom_rank());
}

}  // namespace torchium::optim
