// The plans of K-FAC and natural gradient, one of all groups each, and the capture of layer calls,
// as torch.classes.torchium: registration, no maths.

#include "distributed/communicator.h"
#include "ops/module_capture.h"
#include "ops/option_ops.h"
#include "ops/plan_conversions.h"
#include "optim/kfac/fallback_reasons.h"
#include "optim/kfac/kfac_plan.h"
#include "optim/kfac/kfac_preconditioner_plan.h"
#include "optim/kfac/skipped_layers.h"
#include "optim/natural_gradient/natural_gradient_plan.h"
#include "torchium/optim/kfac.h"
#include "torchium/optim/natural_gradient.h"

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

using optim::detail::JointInputs;
using optim::detail::KfacPlan;
using optim::detail::KfacPreconditionerPlan;
using optim::detail::NaturalGradientPlan;
using MaybeTensor = std::optional<at::Tensor>;

// `lrs`: a tuple of numbers and tensors.
JointInputs inputs_from(const c10::IValue& lrs, const MaybeTensor& found_inf,
                        const MaybeTensor& loss_scale, c10::Device device) {
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
                      const MaybeTensor& mask, int64_t samples,
                      std::optional<at::Generator> generator,
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

// `make`: the plan of an optimizer by its name. The constructor also takes the name under which
// Python has registered the process group (empty: none).
template <typename Plan, c10::intrusive_ptr<Plan> (*make)(const std::string&)>
torch::class_<Plan> register_joint_plan(torch::Library& m, const char* name) {
  using Self = c10::intrusive_ptr<Plan>;
  return m.class_<Plan>(name)
      .def(torch::init([](const std::string& optimizer, const std::string& process_group) {
        Self plan = make(optimizer);
        if (!process_group.empty()) {
          plan->share_with(std::make_shared<distributed::Communicator>(process_group));
        }
        return plan;
      }))
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
      .def("graph_count", [](const Self& self) { return self->graph_count(); })
      .def("graph_bytes", [](const Self& self) { return self->graph_bytes(); })
      .def("bind",
           [](const Self& self, std::vector<at::Tensor> params, const std::vector<Dict>& states,
              std::vector<int64_t> groups, std::vector<std::string> names) {
             self->bind(std::move(params), named(states), std::move(groups), std::move(names));
           })
      .def("memory_report",
           [](const Self& self, const std::vector<at::Tensor>& params,
              const std::vector<Dict>& states, const std::vector<int64_t>& groups_of_params,
              const std::vector<std::string>& names, int64_t groups) {
             return numbers_of(self->memory_report(params, named(states), groups_of_params, names,
                                                   static_cast<size_t>(groups)));
           })
      .def("exclude",
           [](const Self& self, const std::vector<int64_t>& params) { self->exclude(params); })
      .def("forget", [](const Self& self) { self->forget(); })
      .def("next_steps",
           [](const Self& self, int64_t groups) {
             return self->next_steps(static_cast<size_t>(groups));
           })
      .def("withdraw", [](const Self& self) { self->withdraw(); })
      .def("prepare", [](const Self& self) { return self->prepare(); })
      .def("missing_state", [](const Self& self) { return self->missing_state(); })
      .def("step",
           [](const Self& self, const c10::IValue& lrs, const MaybeTensor& found_inf,
              const MaybeTensor& loss_scale) {
             return self->take(inputs_from(lrs, found_inf, loss_scale, self->device()));
           })
      .def("update_preconditioners", [](const Self& self) { self->update_preconditioners(); })
      .def("record_curvature", record_curvature<Plan>)
      .def("damping_update",
           [](const Self& self, double loss_before,
              double loss_after) -> std::tuple<double, double> {
             return self->damping_update(loss_before, loss_after);
           })
      .def("host_steps", [](const Self& self) { return self->host_steps(); })
      .def("request_report", [](const Self& self) { self->request_report(); })
      .def("next_failure", [](const Self& self, bool wait) {
        const auto report = self->next_failure(wait);
        return report ? std::optional(failure_of(0, *report)) : std::nullopt;
      });
}

c10::intrusive_ptr<KfacPlan> make_kfac_plan(const std::string& optimizer) {
  if (optimizer == "KFAC") {
    return c10::make_intrusive<KfacPlan>();
  }
  return c10::make_intrusive<KfacPreconditionerPlan>();
}

void register_kfac_plan(torch::Library& m) {
  using Self = c10::intrusive_ptr<KfacPlan>;
  register_joint_plan<KfacPlan, make_kfac_plan>(m, "KfacPlan")
      .def("set_grad_worker_fraction", &KfacPlan::set_grad_worker_fraction)
      .def("has_parts", &KfacPlan::has_parts)
      .def("lacks_inverses", &KfacPlan::lacks_inverses)
      .def("whole_states",
           [](const Self& self) {
             std::vector<Dict> states;
             for (const auto& state : self->whole_states()) {
               states.push_back(state == nullptr ? Dict() : dict_of(state->tensors()));
             }
             return states;
           })
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
           [](const Self& self, const MaybeTensor& scale) {
             self->set_loss_scale(scale.value_or(at::Tensor()));
           })
      .def("receive_from",
           [](const Self& self, const c10::intrusive_ptr<ModuleCapture>& capture) {
             capture->hand_to(self);
           })
      .def("declare",
           [](const Self& self, const std::vector<int64_t>& rows) {
             std::vector<optim::detail::DeclaredLayer> layers;
             for (size_t i = 0; i + 8 < rows.size(); i += 9) {
               layers.push_back({rows[i], rows[i + 1], rows[i + 2] != 0, rows[i + 3] != 0,
                                 rows[i + 4], rows[i + 5] != 0, rows[i + 6] != 0, rows[i + 7] != 0,
                                 rows[i + 8] != 0});
             }
             self->declare(layers);
           })
      .def("has_warnings", &KfacPlan::has_warnings)
      .def("new_warnings", &KfacPlan::new_warnings)
      .def("problem",
           [](const Self& self, int64_t weight) {
             const auto* layer = self->records().layer(self->param(static_cast<size_t>(weight)));
             return layer == nullptr ? std::string() : layer->problem;
           })
      .def("needs_curvature",
           [](const Self& self, int64_t i) {
             return self->needs_curvature(self->param(static_cast<size_t>(i)));
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
      .def("report",
           [](const Self& self, const std::vector<at::Tensor>& params,
              const std::vector<std::string>& names, const std::vector<Dict>& states,
              const std::vector<std::string>& reasons) {
             const auto report = self->report(params, names, named(states), reasons);
             std::vector<std::tuple<std::string, std::string>> treatments;
             for (const auto& [name, treatment, detail] : report.parameters) {
               treatments.emplace_back(treatment, detail);
             }
             return std::make_tuple(treatments, report.preconditioned, report.fallback,
                                    report.diagonal_A, report.diagonal_G, report.graph_bytes);
           })
      .def("fallback", &KfacPlan::fallback)
      .def("new_fallback", &KfacPlan::new_fallback)
      .def("fallback_warning", [](const Self& self, const std::string& optimizer,
                                  const c10::Dict<std::string, std::vector<std::string>>& names) {
        optim::detail::NamesByKind by_kind;
        for (const auto& entry : names) {
          by_kind[entry.key()] = entry.value();
        }
        return self->fallback_warning(optimizer, by_kind);
      });
}

// Solver, samples, rows, iterations, relative residual.
using Solved = std::tuple<std::string, int64_t, int64_t, int64_t, double>;

// The reports of Python as tables.
std::string kfac_report_table(const std::vector<std::string>& names,
                              const std::vector<std::string>& treatments,
                              const std::vector<std::string>& details, int64_t graph_bytes) {
  optim::KFACReport report;
  for (size_t i = 0; i < names.size(); ++i) {
    report.parameters.push_back({names[i], treatments[i], details[i]});
  }
  report.graph_bytes = graph_bytes;
  return c10::str(report);
}

std::string natural_gradient_report_table(std::string solver, int64_t samples, int64_t rows,
                                          int64_t iterations, double relative_residual,
                                          int64_t graph_bytes) {
  return c10::str(optim::NaturalGradientReport{std::move(solver), samples, rows, iterations,
                                               relative_residual, graph_bytes});
}

c10::intrusive_ptr<NaturalGradientPlan> make_natural_gradient_plan(
    const std::string& /*optimizer*/) {
  return c10::make_intrusive<NaturalGradientPlan>();
}

void register_natural_gradient_plan(torch::Library& m) {
  using Self = c10::intrusive_ptr<NaturalGradientPlan>;
  register_joint_plan<NaturalGradientPlan, make_natural_gradient_plan>(m, "NaturalGradientPlan")
      .def("is_refresh", &NaturalGradientPlan::is_refresh)
      .def("is_start", &NaturalGradientPlan::is_start)
      .def("record",
           [](const Self& self, const at::Tensor& input, const at::Tensor& output_gradient,
              const std::vector<int64_t>& row,
              double eps) { self->receive(call_from(input, output_gradient, row, eps), {}); })
      .def("note_reached",
           [](const Self& self, const std::vector<int64_t>& params) { self->note_reached(params); })
      .def("set_jacobian", &NaturalGradientPlan::set_jacobian)
      .def("has_jacobian", &NaturalGradientPlan::has_jacobian)
      .def("report", [](const Self& self) {
        const auto report = self->report();
        return Solved{report.solver, report.samples, report.rows, report.iterations,
                      report.relative_residual};
      });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  // Implemented in Python: a backward pass has reached the first layer of this capture.
  m.def("backward_started(int capture) -> ()");
  m.def("check_takes_curvature", optim::detail::check_takes_curvature);
  m.def("kfac_report_table", kfac_report_table);
  m.def("natural_gradient_report_table", natural_gradient_report_table);
  m.def("fallback_reason", optim::detail::fallback_reason);
  m.def("unmatched_skips_warning", optim::detail::unmatched_skips_warning);
  m.def("check_grad_workers", optim::detail::check_grad_workers);
  m.class_<ModuleCapture>("ModuleCapture")
      .def(torch::init<int64_t, bool>())
      .def("watch", &ModuleCapture::watch)
      .def("describe", &ModuleCapture::describe)
      .def("add", &ModuleCapture::add)
      .def("begin_products", &ModuleCapture::begin_products)
      .def("end_products", &ModuleCapture::end_products)
      .def("enter_pass", &ModuleCapture::enter_pass)
      .def("add_mixing", &ModuleCapture::add_mixing)
      .def("release", [](const c10::intrusive_ptr<ModuleCapture>& self) { self->hand_to({}); })
      .def("used_outside", &ModuleCapture::used_outside)
      .def("forget", &ModuleCapture::forget)
      .def("warn_of_gradients_without_calls", &ModuleCapture::warn_of_gradients_without_calls)
      .def("calls", &ModuleCapture::calls)
      .def("mixing_module", &ModuleCapture::mixing_module)
      .def("is_mixed", &ModuleCapture::is_mixed);
  register_kfac_plan(m);
  register_natural_gradient_plan(m);
}

}  // namespace torchium::ops
