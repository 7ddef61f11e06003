// The list of the options of Adagrad.
#pragma once

#include "optim/core/options.h"
#include "torchium/optim/adagrad.h"

namespace torchium::optim {

template <typename Options>
requires std::is_same_v<std::remove_const_t<Options>, AdagradOptions>
auto option_fields(Options& o) {
  using namespace detail;
  // clang-format off
  return std::make_tuple(
      Option{"lr", o.lr(), kLearningRate},
      Option{"lr_decay", o.lr_decay(), Number{}},
      Option{"weight_decay", o.weight_decay(), Number{}},
      Option{"initial_accumulator_value", o.initial_accumulator_value(), Number{}},
      Option{"eps", o.eps(), Number{}},
      Option{"full_matrix", o.full_matrix(), Flag{}, kShapesState},
      Option{"block_size", o.block_size(), Integer{}, kShapesState},
      Option{"update_freq", o.update_freq(), Integer{}},
      Option{"root_method", o.root_method(), kRootMethods},
      Option{"maximize", o.maximize(), Flag{}},
      Option{"graphs", o.graphs(), kGraphModes});
  // clang-format on
}

inline void check_combination(const AdagradOptions&) {}

}  // namespace torchium::optim
