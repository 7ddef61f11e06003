// The plans of the optimizers (optim/core/step_plan.h) as torch.classes.torchium: registration, no
// maths.

#include "optim/adagrad/adagrad_plan.h"
#include "optim/core/option_fields.h"
#include "optim/shampoo/shampoo_plan.h"

#include <ATen/ATen.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace torchium::ops {
namespace {

using optim::detail::kConsecutiveRootFailures;
using optim::detail::kConsecutiveSkips;
using optim::detail::NamedTensors;
using Dicts = std::vector<c10::Dict<std::string, at::Tensor>>;
// Skips in a row and the parameter of the last; failed roots in a row and their parameter.
using Failure = std::tuple<int64_t, std::optional<at::Tensor>, int64_t, std::optional<at::Tensor>>;

// `values`: a tuple of names and values in turns. Leaves out what is no option.
template <typename Options>
Options options_from(const c10::IValue& values) {
  Options options;
  const auto& elements = values.toTupleRef().elements();
  optim::detail::visit_options(options, [&](const char* name, auto& value) {
    for (size_t i = 0; i + 1 < elements.size(); i += 2) {
      if (elements[i].toStringRef() == name) {
        value = elements[i + 1].to<std::decay_t<decltype(value)>>();
      }
    }
  });
  return options;
}

std::vector<NamedTensors> named(const Dicts& dicts) {
  std::vector<NamedTensors> all;
  all.reserve(dicts.size());
  for (const auto& dict : dicts) {
    NamedTensors& tensors = all.emplace_back();
    for (const auto& entry : dict) {
      tensors.emplace_back(entry.key(), entry.value());
    }
  }
  return all;
}

std::optional<at::Tensor> defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

template <typename Plan>
std::optional<Failure> next_failure(const c10::intrusive_ptr<Plan>& plan, bool wait) {
  const auto report = plan->next_failure(wait);
  if (!report) {
    return std::nullopt;
  }
  const auto& entries = report->entries;
  return Failure{entries[kConsecutiveSkips], defined(report->non_finite_parameter),
                 entries[kConsecutiveRootFailures], defined(report->failed_parameter)};
}

template <typename Plan, typename Options>
void register_plan(torch::Library& m, const char* name) {
  using Self = c10::intrusive_ptr<Plan>;
  m.class_<Plan>(name)
      .def(torch::init([](const at::Device& device) { return c10::make_intrusive<Plan>(device); }))
      .def("set_options",
           [](const Self& self, const c10::IValue& values) {
             self->set_options(options_from<Options>(values));
           })
      .def("bind",
           [](const Self& self, std::vector<at::Tensor> params, const Dicts& states,
              std::vector<int64_t> host_steps) {
             self->bind(std::move(params), named(states), std::move(host_steps));
           })
      .def("prepare", [](const Self& self) { return self->prepare(); })
      .def("step",
           [](const Self& self, double lr, const std::optional<at::Tensor>& tensor,
              const std::optional<at::Tensor>& found_inf) {
             self->step(tensor ? *tensor : at::scalar_tensor(lr, at::kDouble),
                        found_inf.value_or(at::Tensor()));
           })
      .def("update_preconditioners", [](const Self& self) { self->update_preconditioners(); })
      .def("host_steps", [](const Self& self) { return self->host_steps(); })
      .def("graph_count", [](const Self& self) { return self->graph_count(); })
      .def("graph_bytes", [](const Self& self) { return self->graph_bytes(); })
      .def("request_report", [](const Self& self) { self->request_report(); })
      .def("next_failure", next_failure<Plan>);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  register_plan<optim::detail::ShampooPlan, optim::ShampooOptions>(m, "ShampooPlan");
  register_plan<optim::detail::AdagradPlan, optim::AdagradOptions>(m, "AdagradPlan");
}

}  // namespace torchium::ops
