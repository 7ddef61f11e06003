// The list of the options of AdaHessian.
#pragma once

#include "optim/core/options.h"
#include "torchium/optim/adahessian.h"

namespace torchium::optim {

template <typename Options>
requires std::is_same_v<std::remove_const_t<Options>, AdaHessianOptions>
auto option_fields(Options& o) {
  using namespace detail;
  // clang-format off
  return std::make_tuple(
      Option{"lr", o.lr(), kLearningRate},
      Option{"betas", o.betas(), NumberPair{kRate, kRate}},
      Option{"eps", o.eps(), kPositive},
      Option{"weight_decay", o.weight_decay(), Number{}},
      Option{"hessian_power", o.hessian_power(), kRateOrOne},
      Option{"update_each", o.update_each(), Integer{}},
      Option{"n_samples", o.n_samples(), Integer{}},
      Option{"graphs", o.graphs(), kGraphModes});
  // clang-format on
}

inline void check_combination(const AdaHessianOptions&) {}

}  // namespace torchium::optim
