// One list of the options of an optimizer serves archives, comparison and the Python binding.
#pragma once

#include "torchium/optim/adagrad.h"
#include "torchium/optim/kfac.h"
#include "torchium/optim/natural_gradient.h"
#include "torchium/optim/shampoo.h"

#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

namespace torchium::optim::detail {

template <typename T>
struct OptionField {
  const char* name;
  T& value;
  bool may_be_absent = false;  // from the archives of versions that did not have it
};
template <typename T>
OptionField(const char*, T&) -> OptionField<T>;
template <typename T>
OptionField(const char*, T&, bool) -> OptionField<T>;
constexpr bool kAddedLater = true;

template <typename Options>
requires std::is_same_v<std::remove_const_t<Options>, ShampooOptions>
auto option_fields(Options& o) {
  return std::make_tuple(
      OptionField{"lr", o.lr()}, OptionField{"eps", o.eps()},
      OptionField{"update_freq", o.update_freq()}, OptionField{"weight_decay", o.weight_decay()},
      OptionField{"betas", o.betas()}, OptionField{"momentum", o.momentum()},
      OptionField{"nesterov", o.nesterov()},
      OptionField{"decoupled_weight_decay", o.decoupled_weight_decay()},
      OptionField{"relative_eps", o.relative_eps()}, OptionField{"block_size", o.block_size()},
      OptionField{"merge_dims", o.merge_dims()}, OptionField{"exponent", o.exponent()},
      OptionField{"exponent_warmup", o.exponent_warmup(), kAddedLater},
      OptionField{"preconditioner_1d", o.preconditioner_1d()},
      OptionField{"preconditioned", o.preconditioned(), kAddedLater},
      OptionField{"max_preconditioned_dim", o.max_preconditioned_dim(), kAddedLater},
      OptionField{"grafting", o.grafting()}, OptionField{"grafting_eps", o.grafting_eps()},
      OptionField{"grafting_beta2", o.grafting_beta2()},
      OptionField{"start_preconditioning_step", o.start_preconditioning_step()},
      OptionField{"root_method", o.root_method()},
      OptionField{"root_dtype", o.root_dtype(), kAddedLater},
      OptionField{"matmul_precision", o.matmul_precision(), kAddedLater},
      OptionField{"max_root_failures", o.max_root_failures()},
      OptionField{"maximize", o.maximize()}, OptionField{"capturable", o.capturable()},
      OptionField{"graphs", o.graphs(), kAddedLater});
}

template <typename Options>
requires std::is_same_v<std::remove_const_t<Options>, AdagradOptions>
auto option_fields(Options& o) {
  return std::make_tuple(OptionField{"lr", o.lr()}, OptionField{"lr_decay", o.lr_decay()},
                         OptionField{"weight_decay", o.weight_decay()},
                         OptionField{"initial_accumulator_value", o.initial_accumulator_value()},
                         OptionField{"eps", o.eps()}, OptionField{"full_matrix", o.full_matrix()},
                         OptionField{"block_size", o.block_size()},
                         OptionField{"update_freq", o.update_freq()},
                         OptionField{"root_method", o.root_method(), kAddedLater},
                         OptionField{"maximize", o.maximize()});
}

template <typename Options>
requires std::is_same_v<std::remove_const_t<Options>, KFACOptions>
auto option_fields(Options& o) {
  return std::make_tuple(
      OptionField{"lr", o.lr()}, OptionField{"momentum", o.momentum()},
      OptionField{"weight_decay", o.weight_decay()}, OptionField{"damping", o.damping()},
      OptionField{"TCov", o.TCov()}, OptionField{"TInv", o.TInv()},
      OptionField{"batch_averaged", o.batch_averaged()}, OptionField{"eps", o.eps()},
      OptionField{"stat_decay", o.stat_decay()}, OptionField{"kl_clip", o.kl_clip()},
      OptionField{"damping_split", o.damping_split()},
      OptionField{"root_method", o.root_method(), kAddedLater},
      OptionField{"max_factor_size", o.max_factor_size(), kAddedLater},
      OptionField{"maximize", o.maximize()});
}

template <typename Options>
requires std::is_same_v<std::remove_const_t<Options>, NaturalGradientOptions>
auto option_fields(Options& o) {
  return std::make_tuple(OptionField{"lr", o.lr()}, OptionField{"damping", o.damping()},
                         OptionField{"update_freq", o.update_freq()}, OptionField{"eps", o.eps()},
                         OptionField{"momentum", o.momentum()},
                         OptionField{"max_norm", o.max_norm()}, OptionField{"solver", o.solver()},
                         OptionField{"maximize", o.maximize()});
}

// Calls visit(name, value) for every option.
template <typename Options, typename Visitor>
void visit_options(Options& options, Visitor&& visit) {
  std::apply([&](auto... field) { (visit(field.name, field.value), ...); }, option_fields(options));
}

template <typename Options>
void write_options(torch::serialize::OutputArchive& archive, const Options& options) {
  visit_options(options, [&](const char* name, const auto& value) {
    archive.write(name, c10::IValue(value));
  });
}

// Options that the version which wrote the archive did not have keep their values.
template <typename Options>
void read_options(torch::serialize::InputArchive& archive, Options& options) {
  const auto read = [&](auto field) {
    c10::IValue saved;
    const bool found = archive.try_read(field.name, saved);
    TORCH_CHECK_VALUE(found || field.may_be_absent, "the archive has no option '", field.name,
                      "'; it was not written by this kind of optimizer");
    if (found) {
      field.value = saved.to<std::decay_t<decltype(field.value)>>();
    }
  };
  std::apply([&](auto... field) { (read(field), ...); }, option_fields(options));
}

template <typename Options>
bool equal_options(const Options& lhs, const Options& rhs) {
  bool equal = true;
  std::apply(
      [&](auto... left) {
        std::apply([&](auto... right) { equal = ((left.value == right.value) && ...); },
                   option_fields(rhs));
      },
      option_fields(lhs));
  return equal;
}

template <typename Options>
bool equal_but_lr(Options a, const Options& b) {
  a.lr(b.lr());
  return equal_options(a, b);
}

// Throws c10::ValueError unless these options are the same in all groups.
template <typename Options>
void check_equal_in_all(const char* optimizer,
                        const std::vector<const torch::optim::OptimizerOptions*>& groups,
                        const std::set<std::string>& names) {
  for (size_t group = 1; group < groups.size(); ++group) {
    const auto first = option_fields(dynamic_cast<const Options&>(*groups[0]));
    const auto other = option_fields(dynamic_cast<const Options&>(*groups[group]));
    const auto check = [&](const auto& a, const auto& b) {
      TORCH_CHECK_VALUE(names.count(a.name) == 0 || a.value == b.value, a.name,
                        " must be the same in all parameter groups of ", optimizer, ", but group ",
                        group, " differs from group 0");
    };
    std::apply(
        [&](const auto&... a) { std::apply([&](const auto&... b) { (check(a, b), ...); }, other); },
        first);
  }
}

}  // namespace torchium::optim::detail
