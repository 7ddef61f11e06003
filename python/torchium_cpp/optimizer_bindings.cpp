// torchium_cpp._C.optim: the C++ optimizer classes, for programs that embed them and for tests that
// compare both languages. Python programs use torchium.Shampoo, torchium.KFAC, ...
#include "bindings.h"
#include "optim/adagrad/adagrad_options.h"
#include "optim/adahessian/adahessian_options.h"
#include "optim/core/state_memory.h"
#include "optim/kfac/kfac_options.h"
#include "optim/kfac/kfac_preconditioner_options.h"
#include "optim/natural_gradient/natural_gradient_options.h"
#include "optim/shampoo/shampoo_options.h"
#include "option_conversion.h"
#include "torchium/optim/adagrad.h"
#include "torchium/optim/adahessian.h"
#include "torchium/optim/kfac.h"
#include "torchium/optim/kfac_preconditioner.h"
#include "torchium/optim/natural_gradient.h"
#include "torchium/optim/shampoo.h"

#include <ATen/core/Tensor.h>
#include <torch/serialize/archive.h>

#include <functional>
#include <memory>
#include <optional>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace torchium::python {
namespace {

using optim::Adagrad;
using optim::AdagradOptions;
using optim::AdaHessian;
using optim::AdaHessianOptions;
using optim::KFAC;
using optim::KFACOptions;
using optim::KFACPreconditioner;
using optim::KFACPreconditionerOptions;
using optim::NaturalGradient;
using optim::NaturalGradientOptions;
using optim::SecondOrderOptimizer;
using optim::Shampoo;
using optim::ShampooOptions;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

void translate_errors(std::exception_ptr error) {
  try {
    if (error) {
      std::rethrow_exception(error);
    }
  } catch (const c10::ValueError& e) {
    py::set_error(PyExc_ValueError, e.what_without_backtrace());
  } catch (const c10::Error& e) {
    py::set_error(PyExc_RuntimeError, e.what_without_backtrace());
  }
}

py::typing::Dict<py::str, at::Tensor> state_of(const SecondOrderOptimizer& optimizer,
                                               const at::Tensor& param) {
  py::typing::Dict<py::str, at::Tensor> result;
  const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
  if (found != optimizer.state().end()) {
    const auto& state = static_cast<const optim::SecondOrderParamState&>(*found->second);
    for (const auto& [key, tensor] : state.tensors()) {
      result[py::str(key)] = tensor;
    }
  }
  return result;
}

OptionDict report_of(const KFAC& optimizer) {
  const auto report = optimizer.report();
  OptionDict result;
  result["preconditioned"] = py::cast(report.preconditioned);
  result["fallback"] = py::cast(report.fallback);
  result["diagonal_A"] = py::cast(report.diagonal_A);
  result["diagonal_G"] = py::cast(report.diagonal_G);
  result["graph_bytes"] = report.graph_bytes;
  py::dict parameters;
  for (const auto& [name, treatment, detail] : report.parameters) {
    parameters[py::str(name)] = py::make_tuple(treatment, detail);
  }
  result["parameters"] = parameters;
  return result;
}

OptionDict report_of(const NaturalGradient& optimizer) {
  const auto report = optimizer.report();
  OptionDict result;
  if (!report.solver.empty()) {
    result["solver"] = py::cast(report.solver);
    result["samples"] = py::cast(report.samples);
    result["rows"] = py::cast(report.rows);
    result["iterations"] = py::cast(report.iterations);
    result["relative_residual"] = py::cast(report.relative_residual);
    result["graph_bytes"] = py::cast(report.graph_bytes);
  }
  return result;
}

// AdamWOptions with those of `values` that are AdamW's, which are moved out of it.
AdamWOptions take_adamw_options(AdamWOptions base, py::dict& values) {
  const auto take = [&](const char* name, auto& value) {
    if (values.contains(name)) {
      value = values.attr("pop")(name).template cast<std::decay_t<decltype(value)>>();
    }
  };
  take("lr", base.lr());
  take("betas", base.betas());
  take("eps", base.eps());
  take("weight_decay", base.weight_decay());
  take("amsgrad", base.amsgrad());
  return base;
}

// Options of dicts of parameter groups are AdamW's alone.
std::unique_ptr<Shampoo> shampoo_from_adamw(const Groups& params,
                                            const py::KWArgs<py::object>& hyperparameters) {
  py::dict rest(hyperparameters);
  const AdamWOptions defaults = take_adamw_options({}, rest);
  with_options(ShampooOptions(), rest);  // raises for unknown names
  std::vector<OptimizerParamGroup> groups;
  const py::list items(params);
  if (items.empty() || !py::isinstance<py::dict>(items[0])) {
    groups.emplace_back(items.cast<std::vector<at::Tensor>>());
  } else {
    for (const auto& item : items) {
      py::dict values = item.attr("copy")();
      const auto tensors = values.attr("pop")("params").cast<std::vector<at::Tensor>>();
      groups.emplace_back(tensors,
                          std::make_unique<AdamWOptions>(take_adamw_options(defaults, values)));
    }
  }
  return std::make_unique<Shampoo>(Shampoo::from_adamw(
      groups, defaults,
      [&](ShampooOptions& options) { options = with_options(std::move(options), rest); }));
}

py::typing::Dict<py::str, py::object> memory_report_of(const SecondOrderOptimizer& optimizer) {
  const auto report = optimizer.memory_report();
  const auto numbers_of = [](const auto&... memory) {
    OptionDict result;
    const auto add = [&](const auto& each) {
      for (const auto& [name, value] : optim::detail::numbers_of(each)) {
        result[name.c_str()] = value;
      }
    };
    (add(memory), ...);
    return result;
  };
  py::list groups, parameters;
  for (const auto& group : report.groups) {
    groups.append(numbers_of(group, group.state));
  }
  for (const auto& [name, group, state] : report.parameters) {
    parameters.append(py::make_tuple(name, group, numbers_of(state)));
  }
  OptionDict result;
  result["groups"] = groups;
  result["joint"] = numbers_of(report.joint, report.joint.state);
  result["parameters"] = parameters;
  result["table"] = c10::str(report);
  return result;
}

py::typing::List<OptionDict> rules_of(const Shampoo& optimizer) {
  py::typing::List<OptionDict> result;
  for (const auto& parameter : optimizer.report().parameters) {
    OptionDict line;
    line["name"] = py::cast(parameter.name);
    line["shape"] = py::tuple(py::cast(parameter.shape));
    line["group"] = py::cast(parameter.group);
    line["rule"] = py::cast(parameter.rule);
    line["detail"] = py::cast(parameter.detail);
    line["state_bytes"] = py::cast(parameter.state_bytes);
    result.append(line);
  }
  return result;
}

template <typename Options>
OptionDict options_of(const SecondOrderOptimizer& optimizer, size_t group) {
  OptionDict result;
  const auto& options = dynamic_cast<const Options&>(optimizer.param_groups().at(group).options());
  optim::detail::for_each_option(
      options, [&](const auto& option) { result[option.name] = py::cast(option.value); });
  return result;
}

std::optional<at::Tensor> step(SecondOrderOptimizer& optimizer,
                               std::optional<std::function<at::Tensor()>> closure) {
  const at::Tensor loss = optimizer.step(closure.value_or(nullptr));
  return loss.defined() ? std::optional(loss) : std::nullopt;
}

void set_lr(SecondOrderOptimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) {
    group.options().set_lr(lr);
  }
}

py::bytes save_to_bytes(const SecondOrderOptimizer& optimizer) {
  std::ostringstream stream;
  {
    const py::gil_scoped_release no_gil;
    torch::serialize::OutputArchive archive;
    optimizer.save(archive);
    archive.save_to(stream);
  }
  return py::bytes(stream.str());
}

void load_from_bytes(SecondOrderOptimizer& optimizer, const py::bytes& bytes) {
  const auto data = bytes.cast<std::string_view>();
  const py::gil_scoped_release no_gil;
  torch::serialize::InputArchive archive;
  archive.load_from(data.data(), data.size());
  optimizer.load(archive);
}

void save_to_file(const SecondOrderOptimizer& optimizer, const std::string& path) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to(path);
}

void load_from_file(SecondOrderOptimizer& optimizer, const std::string& path) {
  torch::serialize::InputArchive archive;
  archive.load_from(path);
  optimizer.load(archive);
}

template <typename Optimizer, typename Options, typename Base = SecondOrderOptimizer>
py::class_<Optimizer, Base> bind_optimizer(py::module_& module, const char* name, const char* doc) {
  return py::class_<Optimizer, Base>(module, name, doc)
      .def(py::init(&make_optimizer<Optimizer, Options>), py::arg("params"))
      .def(
          "add_param_group",
          [](Optimizer& self, const OptionDict& group) {
            self.add_param_group(make_group(group, dynamic_cast<const Options&>(self.defaults())));
          },
          py::arg("param_group"), "Adds a dict with 'params' and, if wanted, options.")
      .def("options", &options_of<Options>, py::arg("group") = 0,
           "The options of a parameter group, as a dict.");
}

template <typename Optimizer>
void update_curvature(Optimizer& optimizer, const at::Tensor& outputs, const std::string& loss,
                      const std::string& reduction, std::optional<int64_t> class_dim,
                      const std::optional<at::Tensor>& mask, int64_t samples,
                      std::optional<at::Generator> generator) {
  const py::gil_scoped_release no_gil;
  optimizer.update_curvature(outputs, loss,
                             optim::CurvatureOptions()
                                 .reduction(reduction)
                                 .class_dim(class_dim)
                                 .mask(mask.value_or(at::Tensor()))
                                 .samples(samples)
                                 .generator(std::move(generator)));
}

template <typename Optimizer, typename Options>
py::class_<Optimizer, SecondOrderOptimizer> bind_capturing_optimizer(py::module_& module,
                                                                     const char* name,
                                                                     const char* doc) {
  return bind_optimizer<Optimizer, Options>(module, name, doc)
      .def("zero_grad", &Optimizer::zero_grad, py::arg("set_to_none") = true,
           py::call_guard<py::gil_scoped_release>())
      .def("update_curvature", &update_curvature<Optimizer>, py::arg("outputs"), py::arg("loss"),
           py::kw_only(), py::arg("reduction") = "mean", py::arg("class_dim") = py::none(),
           py::arg("mask") = py::none(), py::arg("samples") = 1, py::arg("generator") = py::none(),
           "The curvature of the next step, for fisher 'mc' and 'ggn'.")
      .def("update_damping", &Optimizer::update_damping, py::arg("loss_before"),
           py::arg("loss_after"), py::call_guard<py::gil_scoped_release>(),
           "Adapts the damping by the losses before and after the last step.")
      .def(
          "report", [](const Optimizer& self) { return report_of(self); },
          "What the optimizer has done, as a dict.")
      .def(
          "report_table", [](const Optimizer& self) { return c10::str(self.report()); },
          "The same as C++ programs print it.");
}

}  // namespace

void bind_optimizers(py::module_& module) {
  py::register_local_exception_translator(&translate_errors);
  auto optim = module.def_submodule("optim", "The C++ optimizers, torchium::optim.");
  using no_gil = py::call_guard<py::gil_scoped_release>;

  py::class_<SecondOrderOptimizer>(optim, "SecondOrderOptimizer",
                                   "torchium::optim::SecondOrderOptimizer")
      .def("step", &step, py::arg("closure") = py::none(), no_gil(),
           "One step; `closure` computes the gradients and returns the loss, a tensor.")
      .def("zero_grad", &SecondOrderOptimizer::zero_grad, py::arg("set_to_none") = true)
      .def("check_errors", &SecondOrderOptimizer::check_errors, no_gil(),
           "Waits for the device and raises RuntimeError for what went wrong so far.")
      .def("memory_report", &memory_report_of,
           "Bytes by kind, of each group, of what they have in common and of each parameter; and "
           "the "
           "table that C++ programs print.")
      .def("set_lr", &set_lr, py::arg("lr"), "Sets the learning rate of all groups.")
      .def("state", &state_of, py::arg("param"),
           "The state tensors of a parameter by name; they share memory with the optimizer.")
      .def("save", &save_to_file, py::arg("path"), no_gil(),
           "Writes options and state to a file, which torch::load reads in C++.")
      .def("load", &load_from_file, py::arg("path"), no_gil(),
           "Reads what save() wrote. Raises ValueError, and loads nothing, if it does not fit.")
      .def("save_bytes", &save_to_bytes)
      .def("load_bytes", &load_from_bytes, py::arg("data"));

  bind_optimizer<Shampoo, ShampooOptions>(optim, "Shampoo", "torchium::optim::Shampoo")
      .def_static("from_adamw", &shampoo_from_adamw, py::arg("params"),
                  "Takes the options of AdamW, and those of Shampoo except eps.")
      .def("report", &rules_of, "The rule of each parameter, a dict for each.")
      .def(
          "report_table", [](const Shampoo& self) { return c10::str(self.report()); },
          "The same as C++ programs print it.")
      .def("update_preconditioners", &Shampoo::update_preconditioners, no_gil(),
           "Computes all roots from the statistics at once.")
      .def("sync_lr", &Shampoo::sync_lr, no_gil(),
           "Writes the learning rate to the tensor that captured steps read.");
  bind_optimizer<Adagrad, AdagradOptions>(optim, "Adagrad", "torchium::optim::Adagrad");
  bind_optimizer<AdaHessian, AdaHessianOptions>(optim, "AdaHessian", "torchium::optim::AdaHessian");
  bind_capturing_optimizer<KFAC, KFACOptions>(optim, "KFAC", "torchium::optim::KFAC");
  bind_optimizer<KFACPreconditioner, KFACPreconditionerOptions, KFAC>(
      optim, "KFACPreconditioner", "torchium::optim::KFACPreconditioner");
  bind_capturing_optimizer<NaturalGradient, NaturalGradientOptions>(
      optim, "NaturalGradient", "torchium::optim::NaturalGradient")
      .def("update_jacobian", &NaturalGradient::update_jacobian, py::arg("rows"),
           py::arg("residuals"), no_gil(),
           "The Jacobian and residuals of the next step, from the caller.");
}

}  // namespace torchium::python
