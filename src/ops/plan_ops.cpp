// The plans of the optimizers as torch.classes.torchium: registration, no maths.

#include "ops/module_capture.h"
#include "ops/option_ops.h"
#include "optim/adagrad/adagrad_plan.h"
#include "optim/blocked/blocked_plans.h"
#include "optim/core/failure_message.h"
#include "optim/kfac/kfac_plan.h"
#include "optim/kfac/kfac_preconditioner_plan.h"
#include "optim/natural_gradient/natural_gradient_plan.h"
#include "optim/reports/message_summary.h"
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
using Lists = std::vector<std::vector<T>>;  // one list per group
// Group (0 for a joint plan), consecutive skips, the parameter of the last one, consecutive failed
// roots, their parameter.
using Failure =
    std::tuple<int64_t, int64_t, std::optional<at::Tensor>, int64_t, std::optional<at::Tensor>>;
// Name, shape, group, rule, detail, bytes of state.
using ReportLine =
    std::tuple<std::string, std::vector<int64_t>, int64_t, std::string, std::string, int64_t>;

using Self = c10::intrusive_ptr<BlockedPlans>;

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

// `options`: a tuple with one tuple of names and values per group. `names`: empty if unknown.
std::vector<BlockedGroup> groups_from(const Self& self, const c10::IValue& options,
                                      Lists<at::Tensor> params, Lists<std::string> names,
                                      const Lists<Dict>& states) {
  std::vector<BlockedGroup> groups;
  for (size_t g = 0; g < params.size(); ++g) {
    BlockedGroup group{options_from(self->optimizer(), options.toTupleRef().elements()[g]),
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

// The states that have changed, for the caller to keep; empty: unchanged.
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

// A learning rate as the plans take it: 0-dim, float64 on the CPU, or any float on `device`.
at::Tensor learning_rate_on(const at::Tensor& tensor, c10::Device device) {
  const at::Tensor lr = tensor.detach().reshape({});
  return lr.is_cpu() ? lr.to(at::kDouble) : lr.to(device, /*non_blocking=*/!device.is_cpu());
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

std::optional<at::Tensor> defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

Failure failure_of(size_t group, const optim::detail::StepReport& report) {
  return {static_cast<int64_t>(group), report.entries[kConsecutiveSkips],
          defined(report.non_finite_parameter), report.entries[kConsecutiveRootFailures],
          defined(report.failed_parameter)};
}

std::optional<Failure> next_failure(const Self& self, bool wait) {
  const auto failure = self->next_failure(wait);
  return failure ? std::optional(failure_of(failure->first, failure->second)) : std::nullopt;
}

// Of one group.
std::vector<Dict> load(const Self& self, int64_t index, const c10::IValue& options,
                       const std::vector<at::Tensor>& params, const std::vector<std::string>& names,
                       const std::vector<Dict>& saved) {
  const BlockedGroup group{options_from(self->optimizer(), options), params, names, {}};
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

// See optim/reports/message_summary.h.
std::string message_summary(const c10::Dict<std::string, std::vector<std::string>>& names) {
  optim::detail::NamesByKind by_kind;
  for (const auto& entry : names) {
    by_kind[entry.key()] = entry.value();
  }
  return optim::detail::summary(by_kind);
}

template <typename Report>
std::string text_of(const Report& report) {
  std::ostringstream stream;
  stream << report;
  return stream.str();
}

// The numbers of each group, then of all, in the order of the fields of Python's report; the table.
std::tuple<Lists<int64_t>, std::string> memory_report(const Self& self, const c10::IValue& options,
                                                      const Lists<at::Tensor>& params,
                                                      const Lists<std::string>& names,
                                                      const Lists<Dict>& states) {
  const auto report = self->memory_report(groups_from(self, options, params, names, states));
  Lists<int64_t> rows;
  auto groups = report.groups;
  groups.push_back(report.total());
  for (const auto& group : groups) {
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

// ---- K-FAC and natural gradient: one plan of all groups

using optim::detail::JointInputs;
using optim::detail::KfacPlan;
using optim::detail::KfacPreconditionerPlan;
using optim::detail::NaturalGradientPlan;
using Tensor = std::optional<at::Tensor>;

// `lrs`: a tuple of numbers and tensors.
JointInputs inputs_from(const c10::IValue& lrs, const Tensor& found_inf, const Tensor& loss_scale,
                        c10::Device device) {
  JointInputs inputs{{}, found_inf.value_or(at::Tensor()), loss_scale.value_or(at::Tensor())};
  for (const c10::IValue& lr : lrs.toTupleRef().elements()) {
    inputs.lrs.push_back(lr.isTensor() ? learning_rate_on(lr.toTensor(), device)
                                       : at::scalar_tensor(lr.toScalar().toDouble(), at::kDouble));
  }
  return inputs;
}

// `row`: a row of `calls` of per_sample_gradients() (gradients/capture/layer_call.h).
gradients::detail::LayerCall call_from(const at::Tensor& input, const at::Tensor& output_gradient,
                                       at::IntArrayRef row, double eps) {
  return gradients::detail::parse_calls({input}, {output_gradient}, row, {eps})[0];
}

// update_curvature() of Python.
template <typename Plan>
void record_curvature(const c10::intrusive_ptr<Plan>& self, const at::Tensor& outputs,
                      std::string loss, std::string reduction, std::optional<int64_t> class_dim,
                      const Tensor& mask, int64_t samples, std::optional<at::Generator> generator,
                      const c10::intrusive_ptr<ModuleCapture>& capture) {
  const auto options = optim::CurvatureOptions()
                           .reduction(std::move(reduction))
                           .class_dim(class_dim)
                           .mask(mask.value_or(at::Tensor()))
                           .samples(samples)
                           .generator(std::move(generator));
  const optim::detail::LossCurvature curvature(outputs, std::move(loss), self->fisher(), options);
  self->record_curvature(outputs, curvature, capture->calls_of(outputs, *self));
}

// The ratio, and the factor for the damping.
template <typename Plan>
std::tuple<double, double> damping_update(const c10::intrusive_ptr<Plan>& self, double loss_before,
                                          double loss_after) {
  return self->damping_update(loss_before, loss_after);
}

// `make`: the plan of an optimizer by its name.
template <typename Plan>
torch::class_<Plan> register_joint_plan(torch::Library& m, const char* name,
                                        c10::intrusive_ptr<Plan> (*make)(std::string)) {
  using Self = c10::intrusive_ptr<Plan>;
  return m.class_<Plan>(name)
      .def(torch::init(make))
      .def("set_options",
           [](const Self& self, const c10::IValue& groups) {
             std::vector<std::shared_ptr<const torch::optim::OptimizerOptions>> kept;
             std::vector<const torch::optim::OptimizerOptions*> options;
             for (const c10::IValue& values : groups.toTupleRef().elements()) {
               kept.push_back(options_from(self->optimizer_name(), values));
               options.push_back(kept.back().get());
             }
             self->set_options(options);
           })
      .def(
          "load",
          [](const Self& self, const at::Tensor& param, const Dict& saved,
             const c10::IValue& options, int64_t params, const std::string& name) {
            return dict_of(self->load(
                param, named(saved), *options_from(self->optimizer_name(), options), params, name));
          })
      .def("bind",
           [](const Self& self, std::vector<at::Tensor> params, const std::vector<Dict>& states,
              std::vector<int64_t> groups, std::vector<std::string> names) {
             std::vector<NamedTensors> tensors;
             for (const Dict& state : states) {
               tensors.push_back(named(state));
             }
             self->bind(std::move(params), tensors, std::move(groups), std::move(names));
           })
      .def("exclude",
           [](const Self& self, const std::vector<int64_t>& params) { self->exclude(params); })
      .def("forget", [](const Self& self) { self->forget(); })
      .def("next_steps",
           [](const Self& self, int64_t groups) {
             return self->next_steps(static_cast<size_t>(groups));
           })
      .def("prepare", [](const Self& self) { return self->prepare(); })
      .def("missing_state", [](const Self& self) { return self->missing_state(); })
      .def("step",
           [](const Self& self, const c10::IValue& lrs, const Tensor& found_inf,
              const Tensor& loss_scale) {
             return self->take(inputs_from(lrs, found_inf, loss_scale, self->device()));
           })
      .def("host_steps", [](const Self& self) { return self->host_steps(); })
      .def("request_report", [](const Self& self) { self->request_report(); })
      .def("next_failure", [](const Self& self, bool wait) {
        const auto report = self->next_failure(wait);
        return report ? std::optional(failure_of(0, *report)) : std::nullopt;
      });
}

c10::intrusive_ptr<KfacPlan> make_kfac_plan(std::string optimizer) {
  if (optimizer == "KFAC") {
    return c10::make_intrusive<KfacPlan>();
  }
  return c10::make_intrusive<KfacPreconditionerPlan>();
}

void register_kfac_plan(torch::Library& m) {
  using Self = c10::intrusive_ptr<KfacPlan>;
  register_joint_plan<KfacPlan>(m, "KfacPlan", make_kfac_plan)
      .def("due",
           [](const Self& self) {
             std::vector<int64_t> due;
             for (size_t i = 0; i < self->due().size(); ++i) {
               if (self->due()[i]) {
                 due.push_back(static_cast<int64_t>(i));
               }
             }
             return due;
           })
      .def("record",
           [](const Self& self, const at::Tensor& input, const at::Tensor& output_gradient,
              const std::vector<int64_t>& row) {
             self->record(call_from(input, output_gradient, row, 0.0));
           })
      .def("set_loss_scale",
           [](const Self& self, const Tensor& scale) {
             self->set_loss_scale(scale.value_or(at::Tensor()));
           })
      .def("receive_from",
           [](const Self& self, const c10::intrusive_ptr<ModuleCapture>& capture) {
             capture->hand_to(self);
           })
      .def("record_curvature", record_curvature<KfacPlan>)
      .def(
          "declare",
          [](const Self& self, const std::vector<int64_t>& rows) {
            std::vector<optim::detail::DeclaredLayer> layers;
            for (size_t i = 0; i + 7 < rows.size(); i += 8) {
              layers.push_back({rows[i], rows[i + 1], rows[i + 2] != 0, rows[i + 3] != 0,
                                rows[i + 4], rows[i + 5] != 0, rows[i + 6] != 0, rows[i + 7] != 0});
            }
            self->declare(layers);
          })
      .def("new_different_samples", [](const Self& self) { return self->new_different_samples(); })
      .def("problem",
           [](const Self& self, int64_t weight) {
             const auto* layer = self->records().layer(self->param(static_cast<size_t>(weight)));
             return layer == nullptr ? std::string() : layer->problem;
           })
      .def("recorded",
           [](const Self& self) {
             std::vector<int64_t> recorded;
             for (size_t i = 0; i < self->size(); ++i) {
               if (self->records().has_sums(self->param(i))) {
                 recorded.push_back(static_cast<int64_t>(i));
               }
             }
             return recorded;
           })
      .def("treatments",
           [](const Self& self) {
             std::vector<std::tuple<std::string, std::string, int64_t>> all;
             for (const auto& [name, detail, weight] : self->treatments()) {
               all.emplace_back(name, detail, weight);
             }
             return all;
           })
      .def("damping_update", damping_update<KfacPlan>)
      .def("fallback", [](const Self& self) { return self->fallback(); })
      .def("new_fallback", [](const Self& self) { return self->new_fallback(); })
      .def("note_warned", [](const Self& self) { self->note_warned(); })
      .def("considered", [](const Self& self) { return self->considered(); })
      .def("preconditioned", [](const Self& self) { return self->preconditioned(); })
      .def("new_diagonals", [](const Self& self) { return self->new_diagonals(); });
}

// Solver, samples, rows, iterations, relative residual.
using Solved = std::tuple<std::string, int64_t, int64_t, int64_t, double>;

c10::intrusive_ptr<NaturalGradientPlan> make_natural_gradient_plan(std::string /*optimizer*/) {
  return c10::make_intrusive<NaturalGradientPlan>();
}

void register_natural_gradient_plan(torch::Library& m) {
  using Self = c10::intrusive_ptr<NaturalGradientPlan>;
  register_joint_plan<NaturalGradientPlan>(m, "NaturalGradientPlan", make_natural_gradient_plan)
      .def("is_refresh", [](const Self& self) { return self->is_refresh(); })
      .def("is_start", [](const Self& self) { return self->is_start(); })
      .def("record", [](const Self& self, const at::Tensor& input,
                        const at::Tensor& output_gradient, const std::vector<int64_t>& row,
                        double eps) { self->record(call_from(input, output_gradient, row, eps)); })
      .def("record_curvature", record_curvature<NaturalGradientPlan>)
      .def("set_jacobian",
           [](const Self& self, std::vector<at::Tensor> rows, at::Tensor residuals) {
             self->set_jacobian(std::move(rows), std::move(residuals));
           })
      .def("has_jacobian", [](const Self& self) { return self->has_jacobian(); })
      .def("damping_update", damping_update<NaturalGradientPlan>)
      .def("report", [](const Self& self) {
        const auto report = self->report();
        return Solved{report.solver, report.samples, report.rows, report.iterations,
                      report.relative_residual};
      });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  m.def("failure_message", failure_message);
  m.def("message_summary", message_summary);
  // Implemented in Python: a backward pass has reached the first layer of this capture.
  m.def("backward_started(int capture) -> ()");
  m.class_<BlockedPlans>("BlockedPlans")
      .def(torch::init([](std::string optimizer) {
        return optimizer == "Shampoo"
                   ? optim::detail::make_blocked_plans<optim::detail::ShampooPlan>(optimizer)
                   : optim::detail::make_blocked_plans<optim::detail::AdagradPlan>(optimizer);
      }))
      .def("bind", bind)
      .def("set_options",
           [](const Self& self, int64_t group, const c10::IValue& options) {
             return self->set_options(group, options_from(self->optimizer(), options));
           })
      .def("prepare", &BlockedPlans::prepare)
      .def("step", step)
      .def("has_all_states", &BlockedPlans::has_all_states)
      .def("update_preconditioners", &BlockedPlans::update_preconditioners)
      .def("request_reports", &BlockedPlans::request_reports)
      .def("next_failure", next_failure)
      .def("load", load)
      .def("memory_report", memory_report)
      .def("report", report)
      .def("host_steps", &BlockedPlans::host_steps)
      .def("graph_count", &BlockedPlans::graph_count);
  m.class_<ModuleCapture>("ModuleCapture")
      .def(torch::init<int64_t, bool>())
      .def("watch", &ModuleCapture::watch)
      .def("describe", &ModuleCapture::describe)
      .def("add", &ModuleCapture::add)
      .def("enter_pass", &ModuleCapture::enter_pass)
      .def("add_mixing", &ModuleCapture::add_mixing)
      .def("release", [](const c10::intrusive_ptr<ModuleCapture>& self) { self->hand_to({}); })
      .def("used_outside", &ModuleCapture::used_outside)
      .def("forget", &ModuleCapture::forget)
      .def("calls", &ModuleCapture::calls)
      .def("mixing_module", &ModuleCapture::mixing_module)
      .def("is_mixed", &ModuleCapture::is_mixed);
  register_kfac_plan(m);
  register_natural_gradient_plan(m);
}

}  // namespace torchium::ops
