// The plans of Shampoo, Adagrad and AdaHessian, and messages of failures, as torch.classes.torchium
// and torch.ops.torchium: registration, no maths.

#include "distributed/sources.h"
#include "ops/option_ops.h"
#include "ops/plan_conversions.h"
#include "optim/adagrad/adagrad_plan.h"
#include "optim/adahessian/adahessian_plan.h"
#include "optim/blocked/blocked_plans.h"
#include "optim/blocked/blocking.h"
#include "optim/core/failure_message.h"
#include "optim/core/state_checks.h"
#include "optim/shampoo/shampoo_plan.h"
#include "optim/shampoo/shampoo_sharing.h"

#include <ATen/ATen.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace torchium::ops {
namespace {

using optim::detail::BlockedGroup;
using optim::detail::BlockedPlan;
using optim::detail::BlockedPlans;
using optim::detail::ParameterState;
template <typename T>
using Lists = std::vector<std::vector<T>>;  // one list per group
// Name, shape, group, rule, detail, bytes of state.
using ReportLine =
    std::tuple<std::string, std::vector<int64_t>, int64_t, std::string, std::string, int64_t>;

using Self = c10::intrusive_ptr<BlockedPlans>;

// `process_group`: the name under which Python has registered it; empty: none. The rest: see
// SharingOptions.
Self make_plans(const std::string& optimizer, const std::string& process_group,
                at::ScalarType comm_dtype, int64_t bucket_bytes) {
  using namespace optim::detail;
  if (!process_group.empty()) {
    return make_shared_shampoo_plans(distributed::Communicator(process_group),
                                     {comm_dtype, bucket_bytes});
  }
  if (optimizer == "Shampoo") {
    return make_blocked_plans<ShampooPlan>(optimizer);
  }
  if (optimizer == "Adagrad") {
    return make_blocked_plans<AdagradPlan>(optimizer);
  }
  return c10::make_intrusive<AdaHessianPlans>();
}

// Of a DTensor: its shape, and for each dimension of the mesh the size, the stride of the ranks,
// and kind, dimension and split factor of the placement; then the number of ranks. Empty: a plain
// tensor.
using Numbers = std::vector<std::vector<int64_t>>;

std::shared_ptr<const distributed::ShardedShape> sharded_shape(const Numbers& numbers) {
  if (numbers.empty()) {
    return nullptr;
  }
  auto result = std::make_shared<distributed::ShardedShape>();
  distributed::Sharding& sharding = result->sharding;
  result->shape = numbers[0];
  sharding.mesh = numbers[1];
  sharding.strides = numbers[2];
  for (size_t m = 0; m < sharding.mesh.size(); ++m) {
    sharding.placements.push_back(
        {static_cast<distributed::Placement::Kind>(numbers[3][m]), numbers[4][m], numbers[5][m]});
  }
  sharding.ranks = numbers[6][0];
  return result;
}

using Groups = std::vector<BlockedGroup>;

BlockedGroup group_from(const Self& self, const c10::IValue& options,
                        std::vector<at::Tensor> params, std::vector<std::string> names,
                        const std::vector<Numbers>& sharded) {
  BlockedGroup group{
      options_from(self->optimizer(), options), std::move(params), std::move(names), {}};
  for (const Numbers& numbers : sharded) {
    group.sharded.push_back(sharded_shape(numbers));
  }
  return group;
}

// A method that takes all groups: function(self, groups, rest...). `options`: a tuple with one
// tuple of names and values per group. `names`: empty if unknown. `sharded`: empty if all
// parameters are plain.
template <typename Result, typename... Rest>
auto of_groups(Result (*function)(const Self&, Groups&, Rest...)) {
  return [function](const Self& self, const c10::IValue& options, Lists<at::Tensor> params,
                    Lists<std::string> names, const Lists<Dict>& states,
                    const Lists<Numbers>& sharded, Rest... rest) {
    Groups groups;
    for (size_t g = 0; g < params.size(); ++g) {
      groups.push_back(group_from(self, options.toTupleRef().elements()[g], std::move(params[g]),
                                  std::move(names[g]),
                                  sharded.empty() ? std::vector<Numbers>() : sharded[g]));
      for (const Dict& state : states[g]) {
        groups.back().states.emplace_back(named(state));
      }
    }
    return function(self, groups, rest...);
  };
}

std::vector<Dict> dicts_of(const std::vector<ParameterState>& states) {
  std::vector<Dict> dicts;
  for (const ParameterState& state : states) {
    dicts.push_back(dict_of(state.named()));
  }
  return dicts;
}

// The states that have changed, for the caller to keep; empty: unchanged.
Lists<Dict> bind(const Self& self, Groups& groups, bool all_with_state) {
  using Active = BlockedPlans::Active;
  const auto before = groups;
  self->bind(groups, all_with_state ? Active::kWithState : Active::kWithGradient);
  Lists<Dict> changed;
  for (size_t g = 0; g < groups.size(); ++g) {
    changed.emplace_back();
    for (size_t i = 0; i < groups[g].states.size(); ++i) {
      const ParameterState& state = groups[g].states[i];
      changed.back().push_back(state.is_same(before[g].states[i]) ? Dict()
                                                                  : dict_of(state.named()));
    }
  }
  return changed;
}

// `tensors`: empty, or the learning rate of each group as a tensor, instead of `lrs`.
void step(const Self& self, const std::vector<double>& lrs, const std::vector<at::Tensor>& tensors,
          const std::optional<at::Tensor>& found_inf) {
  const auto learning_rate = [&](size_t group, const BlockedPlan& plan) {
    if (tensors.empty()) {
      return at::scalar_tensor(lrs[group], at::kDouble);
    }
    return learning_rate_on(tensors[group], plan.device());
  };
  self->step(learning_rate, found_inf.value_or(at::Tensor()));
}

std::optional<Failure> next_failure(const Self& self, bool wait) {
  const auto failure = self->next_failure(wait);
  return failure ? std::optional(failure_of(failure->first, failure->second)) : std::nullopt;
}

// Of one group.
std::vector<Dict> load(const Self& self, int64_t index, const c10::IValue& options,
                       const std::vector<at::Tensor>& params, const std::vector<std::string>& names,
                       const std::vector<Dict>& saved, const std::vector<Numbers>& sharded) {
  const BlockedGroup group = group_from(self, options, params, names, sharded);
  return dicts_of(self->load(index, group, named(saved)));
}

// Ranks that share a step must all call it.
Lists<Dict> whole_states(const Self& self, Groups& groups) {
  Lists<Dict> whole;
  self->agree_on_states(groups, /*as_shares=*/false);
  for (size_t g = 0; g < groups.size(); ++g) {
    whole.push_back(dicts_of(self->whole_states(g, groups[g])));
  }
  return whole;
}

// The whole state without values; whether this rank has a share of it; dims; and slot, matrix,
// offsets and sizes of each own block.
using PlacesOfShare = std::tuple<Dict, bool, std::vector<int64_t>, Numbers>;

// Ranks that share a step must all call it.
Lists<PlacesOfShare> share_places(const Self& self, Groups& groups) {
  Lists<PlacesOfShare> result;
  self->agree_on_states(groups, /*as_shares=*/true);
  for (size_t g = 0; g < groups.size(); ++g) {
    result.emplace_back();
    for (const BlockedPlans::SharePlaces& places : self->share_places(g, groups[g])) {
      Numbers blocks;
      for (const auto& [slot, matrix, rectangle] : places.blocks) {
        blocks.push_back({slot, matrix});
        for (const auto* part : {&rectangle.offsets, &rectangle.sizes}) {
          blocks.back().insert(blocks.back().end(), part->begin(), part->end());
        }
      }
      result.back().emplace_back(dict_of(places.whole.named()), places.is_share, places.dims,
                                 std::move(blocks));
    }
  }
  return result;
}

// See optim/core/failure_message.h.
std::string failure_message(std::string optimizer, int64_t skips,
                            const std::optional<at::Tensor>& non_finite,
                            const std::optional<at::Tensor>& step, std::string non_finite_name,
                            int64_t root_failures, std::string failed_name,
                            int64_t max_root_failures) {
  return optim::detail::failure_message(
      optimizer,
      {skips, non_finite.value_or(at::Tensor()), step.value_or(at::Tensor()), non_finite_name,
       root_failures, failed_name},
      max_root_failures);
}

MemoryNumbers memory_report(const Self& self, Groups& groups) {
  return numbers_of(self->memory_report(groups));
}

std::tuple<std::vector<ReportLine>, std::string> report(const Self& self, Groups& groups) {
  const auto report = self->report(groups);
  std::vector<ReportLine> lines;
  for (const auto& line : report.parameters) {
    lines.emplace_back(line.name, line.shape, static_cast<int64_t>(line.group), line.rule,
                       line.detail, line.state_bytes);
  }
  return {std::move(lines), c10::str(report)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  m.def("failure_message", failure_message);
  m.def("merged_dims",
        [](const std::vector<int64_t>& shape, int64_t block_size, int64_t target_order) {
          return optim::detail::merged_dims(shape, block_size, /*merge_dims=*/true, target_order);
        });
  m.def("check_parameter", optim::detail::check_parameter);
  m.def("check_numbers", optim::detail::check_numbers);
  m.class_<BlockedPlans>("BlockedPlans")
      .def(torch::init(make_plans))
      .def("bind", of_groups(bind))
      .def("set_options",
           [](const Self& self, int64_t group, const c10::IValue& options) {
             return self->set_options(group, options_from(self->optimizer(), options));
           })
      .def("remember",
           [](const Self& self, const c10::IValue& options, const std::vector<at::Tensor>& params) {
             self->remember(options_from(self->optimizer(), options), params);
           })
      .def("prepare", &BlockedPlans::prepare)
      .def("step", step)
      .def("set_loss_scale",
           [](const Self& self, const std::optional<at::Tensor>& scale) {
             self->set_loss_scale(scale.value_or(at::Tensor()));
           })
      .def("withdraw", [](const Self& self, c10::Device device) { self->withdraw(device); })
      .def("owners", &BlockedPlans::owners)
      .def("give_owners", &BlockedPlans::give_owners)
      .def("whole_states", of_groups(whole_states))
      .def("share_places", of_groups(share_places))
      .def("has_all_states", &BlockedPlans::has_all_states)
      .def("update_preconditioners", &BlockedPlans::update_preconditioners)
      .def("request_reports", &BlockedPlans::request_reports)
      .def("next_failure", next_failure)
      .def("load", load)
      .def("memory_report", of_groups(memory_report))
      .def("report", of_groups(report))
      .def("host_steps", &BlockedPlans::host_steps)
      .def("graph_count", &BlockedPlans::graph_count);
}

}  // namespace torchium::ops
