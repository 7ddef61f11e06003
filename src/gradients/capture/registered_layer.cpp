#include "gradients/capture/registered_layer.h"

#include <ATen/ATen.h>
#include <c10/util/Type.h>

#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

namespace torchium::gradients::detail {
namespace {

// The formulas of layers of users.
class Formulas {
 public:
  static Formulas& instance() {
    static auto* formulas = new Formulas();  // never destroyed
    return *formulas;
  }
  void set(std::type_index type, Formula formula) {
    const std::lock_guard lock(mutex_);
    formulas_[type] = std::make_shared<const Formula>(std::move(formula));
  }
  std::shared_ptr<const Formula> find(std::type_index type) {
    const std::shared_lock lock(mutex_);
    const auto found = formulas_.find(type);
    return found == formulas_.end() ? nullptr : found->second;
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<std::type_index, std::shared_ptr<const Formula>> formulas_;
};

// As the bias of a layer norm with these output gradients.
LayerCall call_with_rows(const LayerCall& of, int64_t param, at::Tensor rows) {
  LayerCall call;
  call.kind = LayerKind::kLayerNorm;
  call.bias = param;
  call.micro_batch = of.micro_batch;
  call.settings[kNormalizedDims] = rows.dim() - 1;
  call.input = rows;
  call.output_gradient = std::move(rows);
  return call;
}

void check_rows_of(const RegisteredLayer& registered, const std::string& name,
                   const at::Tensor* rows, const at::Tensor& param, int64_t samples) {
  std::vector<int64_t> expected = param.sizes().vec();
  expected.insert(expected.begin(), samples);
  const bool is_given = rows != nullptr && rows->defined();
  const bool has_type = is_given && at::isFloatingType(rows->scalar_type());
  TORCH_CHECK_VALUE(has_type && rows->sizes() == expected, "the formula registered for ",
                    registered.layer->name(), " returned ",
                    has_type   ? c10::str("shape ", rows->sizes())
                    : is_given ? c10::str("type ", rows->scalar_type())
                               : c10::str("no tensor '", name, "'"),
                    "; it must return the gradients of '", name, "' of all samples, of shape ",
                    at::IntArrayRef(expected));
}

}  // namespace

void register_formula(const std::type_info& type, Formula formula) {
  const std::string name = c10::demangle(type.name());
  TORCH_CHECK_VALUE(!name.starts_with("torch::nn::"), "the layer is ", name,
                    " of libtorch, which calls no layer_call(); register a class of your own");
  TORCH_CHECK_VALUE(formula != nullptr, "there is no formula for ", name);
  Formulas::instance().set(type, std::move(formula));
}

std::shared_ptr<const Formula> formula_of(std::type_index type) {
  return Formulas::instance().find(type);
}

void apply_formulas(const std::vector<at::Tensor>& params, std::vector<LayerCall>& calls) {
  std::vector<LayerCall> result;
  for (LayerCall& call : calls) {
    if (call.registered == nullptr) {
      result.push_back(std::move(call));
      continue;
    }
    const RegisteredLayer& registered = *call.registered;
    const SampleRows found =
        (*registered.formula)(*registered.layer, call.input, call.output_gradient);
    const auto add = [&](int64_t param, const std::string& name) {
      if (param >= 0) {
        const at::Tensor* rows = found.find(name);
        check_rows_of(registered, name, rows, params[param], call.input.size(0));
        result.push_back(call_with_rows(call, param, *rows));
      }
    };
    add(call.weight, registered.weight);
    add(call.bias, registered.bias);
  }
  calls = std::move(result);
}

}  // namespace torchium::gradients::detail
