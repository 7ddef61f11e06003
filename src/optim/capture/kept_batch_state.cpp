#include "optim/capture/kept_batch_state.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>
#include <torch/serialize/archive.h>

#include <array>
#include <map>
#include <utility>

namespace torchium::optim {

using gradients::detail::LayerCall;
using gradients::detail::LayerKind;

namespace {

constexpr int64_t kRowSize = 13;  // LayerCall as integers, and its place among all calls

std::array<int64_t, kRowSize> row_of(const LayerCall& call, int64_t place) {
  std::array<int64_t, kRowSize> row{static_cast<int64_t>(call.kind), call.weight, call.bias,
                                    call.micro_batch};
  std::copy(call.settings.begin(), call.settings.end(), row.begin() + 4);
  row.back() = place;
  return row;
}

LayerCall call_of(const int64_t* row) {
  LayerCall call;
  call.kind = static_cast<LayerKind>(row[0]);
  call.weight = row[1];
  call.bias = row[2];
  call.micro_batch = row[3];
  std::copy_n(row + 4, call.settings.size(), call.settings.begin());
  return call;
}

bool are_uses(const at::Tensor& rows, int64_t param_count) {
  if (rows.scalar_type() != at::kLong || rows.dim() != 2 || rows.size(1) != kRowSize) {
    return false;
  }
  const at::Tensor cpu = rows.cpu().contiguous();
  for (const auto j : c10::irange(cpu.size(0))) {
    const int64_t* row = cpu.const_data_ptr<int64_t>() + j * kRowSize;
    const bool has_kind = row[0] >= 0 && row[0] <= static_cast<int64_t>(LayerKind::kGroupNorm);
    const auto is_param = [&](int64_t i) { return i >= -1 && i < param_count; };
    if (!has_kind || !is_param(row[1]) || !is_param(row[2]) || std::max(row[1], row[2]) < 0) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::unique_ptr<torch::optim::OptimizerParamState> NaturalGradientParamState::clone() const {
  return std::make_unique<NaturalGradientParamState>(*this);
}

std::vector<SecondOrderParamState::NamedTensor> NaturalGradientParamState::parameter_shaped() {
  return {{"momentum_buffer", &momentum_buffer()}};
}

// What was captured keeps its dtype.
void NaturalGradientParamState::convert_to(const at::Tensor& param) {
  SecondOrderParamState::convert_to(param);
  for (auto* tensors : {&inputs(), &output_gradients()}) {
    for (at::Tensor& tensor : *tensors) {
      tensor = tensor.to(param.device());
    }
  }
}

std::vector<std::pair<std::string, at::Tensor>> NaturalGradientParamState::tensors() const {
  auto result = SecondOrderParamState::tensors();
  if (!uses().defined()) {
    return result;
  }
  result.emplace_back("uses", uses());
  result.emplace_back("use_eps", use_eps());
  for (const auto j : c10::irange(inputs().size())) {
    result.emplace_back("inputs." + std::to_string(j), inputs()[j]);
    result.emplace_back("output_gradients." + std::to_string(j), output_gradients()[j]);
  }
  return result;
}

void NaturalGradientParamState::serialize(torch::serialize::InputArchive& archive) {
  SecondOrderParamState::serialize(archive);
  if (!archive.try_read("uses", uses(), /*is_buffer=*/true)) {
    return;
  }
  archive.try_read("use_eps", use_eps(), /*is_buffer=*/true);
  at::Tensor input;
  at::Tensor gradient;
  for (size_t j = 0;
       archive.try_read("inputs." + std::to_string(j), input, /*is_buffer=*/true) &&
       archive.try_read("output_gradients." + std::to_string(j), gradient, /*is_buffer=*/true);
       ++j) {
    inputs().push_back(std::exchange(input, {}));
    output_gradients().push_back(std::exchange(gradient, {}));
  }
}

namespace detail {

void clear_batch(const std::vector<at::Tensor>& params, const BatchStateOf& state_of) {
  for (const auto& param : params) {
    if (auto* state = state_of(param)) {
      state->uses({}).use_eps({});
      state->inputs({}).output_gradients({});
    }
  }
}

void write_batch(const KeptBatch& batch, const std::vector<at::Tensor>& params,
                 const BatchStateOf& state_of) {
  std::map<int64_t, std::vector<int64_t>> places_of;  // of the calls of each owner
  for (const auto place : c10::irange(batch.calls.size())) {
    const LayerCall& call = batch.calls[place];
    places_of[call.weight >= 0 ? call.weight : call.bias].push_back(static_cast<int64_t>(place));
  }
  for (const auto& [owner, places] : places_of) {
    const auto count = static_cast<int64_t>(places.size());
    at::Tensor rows = at::empty({count, kRowSize}, at::kLong);
    at::Tensor eps = at::empty({count}, at::kDouble);
    NaturalGradientParamState& state = *state_of(params[owner]);
    for (const auto j : c10::irange(count)) {
      const LayerCall& call = batch.calls[places[j]];
      const auto row = row_of(call, places[j]);
      std::copy(row.begin(), row.end(), rows.mutable_data_ptr<int64_t>() + j * kRowSize);
      eps.mutable_data_ptr<double>()[j] = call.eps;
      state.inputs().push_back(call.input.clone());
      state.output_gradients().push_back(call.output_gradient.clone());
    }
    state.uses(rows).use_eps(eps);
  }
}

std::shared_ptr<const KeptBatch> read_batch(const std::vector<at::Tensor>& params,
                                            const BatchStateOf& state_of) {
  std::map<int64_t, LayerCall> found;  // by place
  for (const auto& param : params) {
    const auto* state = state_of(param);
    if (state == nullptr || !state->uses().defined()) {
      continue;
    }
    for (const auto j : c10::irange(state->uses().size(0))) {
      const int64_t* row = state->uses().const_data_ptr<int64_t>() + j * kRowSize;
      LayerCall call = call_of(row);
      call.eps = state->use_eps().const_data_ptr<double>()[j];
      call.input = state->inputs()[j];
      call.output_gradient = state->output_gradients()[j];
      found.emplace(row[kRowSize - 1], std::move(call));
    }
  }
  if (found.empty()) {
    return nullptr;
  }
  auto batch = std::make_shared<KeptBatch>();
  for (auto& [place, call] : found) {
    batch->calls.push_back(std::move(call));
  }
  return batch;
}

void fit_batch(const NaturalGradientParamState& loaded, NaturalGradientParamState& fitted,
               const at::Tensor& param, int64_t param_count, const std::string& name) {
  if (!loaded.uses().defined()) {
    return;
  }
  const at::Tensor& rows = loaded.uses();
  const auto fits = [&](const at::Tensor& tensor, int64_t size) {
    return tensor.defined() && tensor.scalar_type() == at::kDouble &&
           tensor.sizes() == at::IntArrayRef({size});
  };
  TORCH_CHECK_VALUE(are_uses(rows, param_count) && fits(loaded.use_eps(), rows.size(0)) &&
                        loaded.inputs().size() == static_cast<size_t>(rows.size(0)),
                    "the batch of ", name,
                    " in the archive is not that of layers of the optimizer");
  fitted.uses(rows.cpu().clone(at::MemoryFormat::Contiguous));
  fitted.use_eps(loaded.use_eps().cpu().clone(at::MemoryFormat::Contiguous));
  for (const auto j : c10::irange(loaded.inputs().size())) {
    LayerCall call = call_of(fitted.uses().const_data_ptr<int64_t>() + j * kRowSize);
    call.input = loaded.inputs()[j].to(param.device(), /*non_blocking=*/false, /*copy=*/true);
    call.output_gradient =
        loaded.output_gradients()[j].to(param.device(), /*non_blocking=*/false, /*copy=*/true);
    gradients::detail::check_call_tensors(call, j);
    fitted.inputs().push_back(call.input);
    fitted.output_gradients().push_back(call.output_gradient);
  }
}

void check_samples(const KeptBatch& batch,
                   const std::function<std::string(int64_t)>& name_of_param) {
  const auto name = [&](const LayerCall& call) {
    return "the layer of '" + name_of_param(call.weight >= 0 ? call.weight : call.bias) + "'";
  };
  struct Pass {
    const LayerCall* first = nullptr;
    const LayerCall* positions = nullptr;  // an embedding of a vector of indices
    const LayerCall* tokens = nullptr;     // one of a matrix with as many columns
  };
  std::map<int64_t, Pass> passes;
  for (const LayerCall& call : batch.calls) {
    Pass& pass = passes[call.micro_batch];
    pass.first = pass.first == nullptr ? &call : pass.first;
    const auto count = gradients::detail::samples_of(*pass.first);
    const auto samples = gradients::detail::samples_of(call);
    TORCH_CHECK_VALUE(samples == count, name(*pass.first), " has seen ", count,
                      " samples in dimension 0 of its input, ", name(call), " ", samples,
                      "; dimension 0 must be the sample in all layers (expand positions to "
                      "[batch, ...])");
    if (call.kind == LayerKind::kEmbedding && call.input.dim() == 1) {
      pass.positions = &call;
    } else if (call.kind == LayerKind::kEmbedding && call.input.dim() > 1 &&
               call.input.size(1) == count) {
      pass.tokens = &call;
    }
    TORCH_CHECK_VALUE(pass.positions == nullptr || pass.tokens == nullptr, name(*pass.positions),
                      " has looked up ", count,
                      " indices, which may be samples or positions: ", name(*pass.tokens),
                      " has seen ", pass.tokens->input.sizes(), "; expand positions to that shape");
  }
}

}  // namespace detail
}  // namespace torchium::optim
