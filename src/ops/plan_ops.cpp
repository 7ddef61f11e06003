// The plans of the optimizers (optim/blocked/blocked_plans.h) as torch.classes.torchium, and state
// from checkpoints: registration, no maths.

#include "ops/option_ops.h"
#include "optim/adagrad/adagrad_plan.h"
#include "optim/blocked/blocked_plans.h"
#include "optim/core/state_checks.h"
#include "optim/shampoo/shampoo_plan.h"

#include <ATen/ATen.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace torchium::ops {
namespace {

using optim::detail::BlockedGroup;
using optim::detail::BlockedPlan;
using optim::detail::BlockedPlans;
using optim::detail::kConsecutiveRootFailures;
using optim::detail::kConsecutiveSkips;
using optim::detail::NamedTensors;
using optim::detail::ParameterState;
using Dict = c10::Dict<std::string, at::Tensor>;
template <typename T>
using Lists = std::vector<std::vector<T>>;  // one list a group
// Group, skips in a row and the parameter of the last, failed roots in a row and their parameter.
using Failure =
    std::tuple<int64_t, int64_t, std::optional<at::Tensor>, int64_t, std::optional<at::Tensor>>;
// Name, shape, group, rule, detail, bytes of state.
using ReportLine =
    std::tuple<std::string, std::vector<int64_t>, int64_t, std::string, std::string, int64_t>;

// The plans of one kind of optimizer.
struct Plans : BlockedPlans {
  explicit Plans(std::string optimizer)
      : BlockedPlans(optimizer == "Shampoo" ? make_plan<optim::detail::ShampooPlan>
                                            : make_plan<optim::detail::AdagradPlan>),
        optimizer(std::move(optimizer)) {}

  template <typename Plan>
  static c10::intrusive_ptr<BlockedPlan> make_plan(c10::Device device) {
    return c10::make_intrusive<Plan>(device);
  }

  std::string optimizer;
};
using Self = c10::intrusive_ptr<Plans>;

NamedTensors named(const Dict& dict) {
  NamedTensors tensors;
  for (const auto& entry : dict) {
    tensors.emplace_back(entry.key(), entry.value());
  }
  return tensors;
}

Dict dict_of(const NamedTensors& tensors) {
  Dict dict;
  for (const auto& [key, tensor] : tensors) {
    dict.insert(key, tensor);
  }
  return dict;
}

// `options`: a tuple with one of names and values for each group. `names`: empty ones are not
// known.
std::vector<BlockedGroup> groups_from(const Self& self, const c10::IValue& options,
                                      Lists<at::Tensor> params, Lists<std::string> names,
                                      const Lists<Dict>& states) {
  std::vector<BlockedGroup> groups;
  for (size_t g = 0; g < params.size(); ++g) {
    BlockedGroup group{options_from(self->optimizer, options.toTupleRef().elements()[g]),
                       std::move(params[g]),
                       std::move(names[g]),
                       {}};
    for (const Dict& state : states[g]) {
      group.states.emplace_back(named(state));
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

// The states that the caller has to keep instead of what it has; an empty one: it has that.
Lists<Dict> bind(const Self& self, const c10::IValue& options, Lists<at::Tensor> params,
                 Lists<std::string> names, const Lists<Dict>& states, bool all_with_state) {
  using Active = BlockedPlans::Active;
  auto groups = groups_from(self, options, std::move(params), std::move(names), states);
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

// `tensors`: empty, or the learning rate of each group in a tensor instead.
void step(const Self& self, const std::vector<double>& lrs, const std::vector<at::Tensor>& tensors,
          const std::optional<at::Tensor>& found_inf) {
  const auto learning_rate = [&](size_t group, const BlockedPlan& plan) {
    if (tensors.empty()) {
      return at::scalar_tensor(lrs[group], at::kDouble);
    }
    const at::Tensor lr = tensors[group].detach().reshape({});
    const c10::Device device = plan.device();
    return lr.is_cpu() ? lr.to(at::kDouble) : lr.to(device, /*non_blocking=*/!device.is_cpu());
  };
  self->step(learning_rate, found_inf.value_or(at::Tensor()));
}

std::optional<at::Tensor> defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

std::optional<Failure> next_failure(const Self& self, bool wait) {
  const auto failure = self->next_failure(wait);
  if (!failure) {
    return std::nullopt;
  }
  const auto& [group, report] = *failure;
  return Failure{static_cast<int64_t>(group), report.entries[kConsecutiveSkips],
                 defined(report.non_finite_parameter), report.entries[kConsecutiveRootFailures],
                 defined(report.failed_parameter)};
}

// Of one group.
std::vector<Dict> load(const Self& self, int64_t index, const c10::IValue& options,
                       const std::vector<at::Tensor>& params, const std::vector<std::string>& names,
                       const std::vector<Dict>& saved) {
  const BlockedGroup group{options_from(self->optimizer, options), params, names, {}};
  std::vector<NamedTensors> states;
  for (const Dict& state : saved) {
    states.push_back(named(state));
  }
  std::vector<Dict> loaded;
  for (const ParameterState& state : self->load(index, group, states)) {
    loaded.push_back(dict_of(state.named()));
  }
  return loaded;
}

// See optim/core/state_checks.h.
Dict loaded_state(const Dict& fresh, const Dict& saved, std::vector<std::string> buffers,
                  std::vector<std::string> counts, const at::Tensor& param, std::string name) {
  return dict_of(optim::detail::loaded_state(named(fresh), named(saved),
                                             {std::move(buffers), std::move(counts)}, param, name));
}

template <typename Report>
std::string text_of(const Report& report) {
  std::ostringstream stream;
  stream << report;
  return stream.str();
}

// The numbers of each group in the order of the fields of Python's report, and the table.
std::tuple<Lists<int64_t>, std::string> memory_report(const Self& self, const c10::IValue& options,
                                                      const Lists<at::Tensor>& params,
                                                      const Lists<std::string>& names,
                                                      const Lists<Dict>& states) {
  const auto report = self->memory_report(groups_from(self, options, params, names, states));
  Lists<int64_t> rows;
  for (const auto& group : report.groups) {
    const auto& s = group.state;
    rows.push_back({group.elements, group.parameters, group.graphs, s.statistics, s.roots,
                    s.averages, s.grafting_second_moments, s.momentum_buffers, s.diagonals,
                    s.counters});
  }
  return {std::move(rows), text_of(report)};
}

std::tuple<std::vector<ReportLine>, std::string> report(const Self& self,
                                                        const c10::IValue& options,
                                                        const Lists<at::Tensor>& params,
                                                        const Lists<std::string>& names,
                                                        const Lists<Dict>& states) {
  const auto report = self->report(groups_from(self, options, params, names, states));
  std::vector<ReportLine> lines;
  for (const auto& line : report.parameters) {
    lines.emplace_back(line.name, line.shape, static_cast<int64_t>(line.group), line.rule,
                       line.detail, line.state_bytes);
  }
  return {std::move(lines), text_of(report)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  m.def("loaded_state", loaded_state);
  m.class_<Plans>("BlockedPlans")
      .def(torch::init<std::string>())
      .def("bind", bind)
      .def("set_options",
           [](const Self& self, int64_t group, const c10::IValue& options) {
             return self->set_options(group, options_from(self->optimizer, options));
           })
      .def("prepare", [](const Self& self) { return self->prepare(); })
      .def("step", step)
      .def("has_all_states", [](const Self& self) { return self->has_all_states(); })
      .def("update_preconditioners", [](const Self& self) { self->update_preconditioners(); })
      .def("request_reports", [](const Self& self) { self->request_reports(); })
      .def("next_failure", next_failure)
      .def("load", load)
      .def("memory_report", memory_report)
      .def("report", report)
      .def("host_steps",
           [](const Self& self, const at::Tensor& param) { return self->host_steps(param); })
      .def("graph_count", [](const Self& self) { return self->graph_count(); });
}

}  // namespace torchium::ops
