// The list of Shampoo's options.
#pragma once

#include "optim/core/options.h"
#include "torchium/optim/shampoo.h"

namespace torchium::optim {

template <typename Options>
requires std::is_same_v<std::remove_const_t<Options>, ShampooOptions>
auto option_fields(Options& o) {
  using namespace detail;
  // clang-format off
  return std::make_tuple(
      Option{"lr", o.lr(), kLearningRate},
      Option{"eps", o.eps(), Number{}},
      Option{"update_freq", o.update_freq(), Integer{}},
      Option{"weight_decay", o.weight_decay(), Number{}},
      Option{"betas", o.betas(), NumberPair{kRate, kRateOrOne}},
      Option{"momentum", o.momentum(), kRate},
      Option{"nesterov", o.nesterov(), Flag{}},
      Option{"decoupled_weight_decay", o.decoupled_weight_decay(), Flag{}},
      Option{"relative_eps", o.relative_eps(), Number{}},
      Option{"block_size", o.block_size(), Integer{}, kShapesState},
      Option{"merge_dims", o.merge_dims(), Flag{}, kShapesState},
      Option{"target_order", o.target_order(), Integer{0}, kShapesState},
      Option{"exponent", o.exponent(), Number{-kInfinity, 0.0, /*without_low=*/true}},
      Option{"exponent_warmup", o.exponent_warmup(), Integer{0}},
      Option{"preconditioner_1d", o.preconditioner_1d(), one_of("diagonal", "full"), kShapesState},
      Option{"preconditioned", o.preconditioned(), Flag{}, kShapesState},
      Option{"max_preconditioned_dim", o.max_preconditioned_dim(), Integer{}, kShapesState},
      Option{"grafting", o.grafting(), one_of("sgd", "adagrad", "rmsprop", "adam"), kShapesState},
      Option{"grafting_eps", o.grafting_eps(), Number{}},
      Option{"grafting_beta2", o.grafting_beta2(), kRate},
      Option{"start_preconditioning_step", o.start_preconditioning_step(), Integer{}},
      Option{"root_method", o.root_method(), kRootMethods},
      Option{"root_dtype", o.root_dtype(), one_of("bfloat16"), kShapesState},
      Option{"matmul_precision", o.matmul_precision(), one_of("highest", "high")},
      Option{"max_root_failures", o.max_root_failures(), Integer{}},
      Option{"maximize", o.maximize(), Flag{}},
      Option{"capturable", o.capturable(), Flag{}},
      Option{"graphs", o.graphs(), kGraphModes});
  // clang-format on
}

inline void check_combination(const ShampooOptions& o) {
  TORCH_CHECK_VALUE(!o.nesterov() || o.momentum() > 0.0,
                    "nesterov=True needs momentum above 0, got momentum=0.0");
  TORCH_CHECK_VALUE(o.merge_dims() || !o.target_order(),
                    "target_order=", detail::text_of(o.target_order()),
                    " says how dimensions merge and needs merge_dims=True; target_order=0 merges "
                    "none, got merge_dims=False");
}

}  // namespace torchium::optim
