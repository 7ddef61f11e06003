// What K-FAC's plan reports of each parameter.
#include "optim/kfac/kfac_plan.h"

#include <c10/util/irange.h>

namespace torchium::optim::detail {
namespace {

std::string structure_text(const at::Tensor& factor) {
  switch (linalg::detail::structure_of(factor)) {
    case Structure::kDiagonal:
      return "the diagonal of ";
    case Structure::kToeplitz:
      return "Toeplitz ";
    case Structure::kBlockDiagonal:
      return c10::str("blocks of ", factor.size(2), " of ");
    default:
      return "";
  }
}

// "A 5, G 3"; "4 groups with A 9, the diagonal of G 2"
std::string orders_of(const at::Tensor& A, const at::Tensor& G) {
  const auto order = [](const char* name, const at::Tensor& factor) {
    return c10::str(structure_text(factor), name, " ", factor.size(1));
  };
  const std::string groups = A.size(0) > 1 ? c10::str(A.size(0), " groups with ") : "";
  return groups + order("A", A) + ", " + order("G", G);
}

}  // namespace

KfacPlan::Treatment KfacPlan::treatment(size_t i) const {
  const KFACParamState& state = state_of(i);
  const at::TensorImpl* impl = param(i).unsafeGetTensorImpl();
  if (!state.step().defined()) {
    return {"none", ""};
  }
  if (fallback_.count(impl) != 0) {
    return {"fallback", ""};
  }
  const at::Tensor& A = factor_of_inputs(state);
  const at::Tensor& G = factor_of_gradients(state);
  if (A.defined() && G.defined()) {
    return {A.dim() == 2 || G.dim() == 2 ? "diagonal" : "factors", orders_of(A, G)};
  }
  if (state.fisher_blocks().defined()) {
    const auto k = state.fisher_blocks().size(-1);
    return {"unit-wise", c10::str(state.fisher_blocks().size(0), " blocks ", k, " x ", k)};
  }
  const at::TensorImpl* weight = records_.weight_beside(param(i));
  for (const auto k : c10::irange(size())) {
    if (param(k).unsafeGetTensorImpl() == weight && fallback_.count(weight) == 0) {
      Treatment shared = treatment(k);
      shared.weight = static_cast<int64_t>(k);
      return shared;
    }
  }
  return {"none", ""};
}

KFACReport KfacPlan::report(const std::vector<at::Tensor>& params,
                            const std::vector<std::string>& names,
                            const std::vector<NamedTensors>& states,
                            const std::vector<std::string>& reasons) const {
  const auto is_diagonal = [](const at::Tensor& factor) {
    return factor.defined() && factor.dim() == 2;
  };
  std::unordered_map<const at::TensorImpl*, std::string> name_of;
  for (const auto i : c10::irange(params.size())) {
    name_of[params[i].unsafeGetTensorImpl()] = names[i];
  }
  KFACReport report;
  report.graph_bytes = graph_bytes();
  for (const auto i : c10::irange(params.size())) {
    KFACParamState state;
    for (const auto& [key, tensor] : states[i]) {
      state.assign(key, tensor);
    }
    const bool has_state = state.step().defined();
    const int64_t place = position(params[i]);
    auto [name, detail, weight] = place < 0 ? Treatment{"none", ""} : treatment(place);
    if (name == "none") {
      detail =
          c10::str("has taken no step", has_state ? " since its state was loaded or copied" : "");
    } else if (name == "fallback") {
      detail = reasons[i];
    } else if (weight >= 0) {
      detail += " of " + name_of[param(weight).unsafeGetTensorImpl()];
    }
    report.parameters.push_back({names[i], name, detail});
    if (has_state) {
      const bool falls_back = fallback_.count(params[i].unsafeGetTensorImpl()) != 0;
      (falls_back ? report.fallback : report.preconditioned).push_back(names[i]);
      if (is_diagonal(factor_of_inputs(state))) {
        report.diagonal_A.push_back(names[i]);
      }
      if (is_diagonal(factor_of_gradients(state))) {
        report.diagonal_G.push_back(names[i]);
      }
    }
  }
  return report;
}

std::vector<int64_t> KfacPlan::fallback() const {
  std::vector<int64_t> result;
  for (const auto i : c10::irange(size())) {
    if (fallback_.count(param(i).unsafeGetTensorImpl()) != 0) {
      result.push_back(static_cast<int64_t>(i));
    }
  }
  return result;
}

}  // namespace torchium::optim::detail
