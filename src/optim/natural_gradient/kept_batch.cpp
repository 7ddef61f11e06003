#include "optim/natural_gradient/kept_batch.h"

#include "gradients/jacobian/jacobian.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <array>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace torchium::optim {

using gradients::detail::LayerCall;
using gradients::detail::LayerKind;

namespace {

// LayerCall as integers, and its place among all calls.
constexpr int64_t kRowSize = gradients::detail::kCallRowSize + 1;

std::array<int64_t, kRowSize> row_of(const LayerCall& call, int64_t place) {
  std::array<int64_t, kRowSize> row{static_cast<int64_t>(call.kind), call.weight, call.bias,
                                    call.micro_batch};
  std::copy(call.settings.begin(), call.settings.end(), row.begin() + 4);
  row.back() = place;
  return row;
}

bool are_calls(const at::Tensor& rows, int64_t param_count) {
  if (rows.scalar_type() != at::kLong || rows.dim() != 2 || rows.size(1) != kRowSize) {
    return false;
  }
  const at::Tensor cpu = rows.cpu().contiguous();
  for (const auto j : c10::irange(cpu.size(0))) {
    const int64_t* row = cpu.const_data_ptr<int64_t>() + j * kRowSize;
    const bool has_kind =
        row[0] >= 0 && row[0] <= static_cast<int64_t>(gradients::detail::kLastKind);
    const auto is_param = [&](int64_t i) { return i >= -1 && i < param_count; };
    if (!has_kind || !is_param(row[1]) || !is_param(row[2]) || std::max(row[1], row[2]) < 0) {
      return false;
    }
  }
  return true;
}

// Copies of tensors in the memory of earlier ones, so that the state stays the same tensors.
class CopiesInPlace {
 public:
  // In old[j] if that is there, has the layout, and holds no other copy. A tensor that comes again
  // has one copy: columns of a curvature share inputs.
  at::Tensor add(const at::Tensor& tensor, const std::vector<at::Tensor>& old, int64_t j) {
    at::Tensor& copy = copies_[tensor.unsafeGetTensorImpl()];
    if (copy.defined()) {
      return copy;
    }
    sources_.push_back(tensor);  // no other may take its place
    const bool fits = j < static_cast<int64_t>(old.size()) && old[j].defined() &&
                      has_layout_of_copy(old[j], tensor) &&
                      used_.insert(old[j].unsafeGetTensorImpl()).second;
    copy = fits ? old[j].copy_(tensor) : tensor.clone();
    return copy;
  }

 private:
  static bool has_layout_of_copy(const at::Tensor& old, const at::Tensor& tensor) {
    return old.sizes() == tensor.sizes() && old.scalar_type() == tensor.scalar_type() &&
           old.device() == tensor.device() &&
           (old.strides() == tensor.strides() || !tensor.is_non_overlapping_and_dense());
  }

  std::unordered_map<const at::TensorImpl*, at::Tensor> copies_;
  std::unordered_set<const at::TensorImpl*> used_;
  std::vector<at::Tensor> sources_;
};

}  // namespace

std::unique_ptr<torch::optim::OptimizerParamState> NaturalGradientParamState::clone() const {
  return std::make_unique<NaturalGradientParamState>(*this);
}

std::vector<SecondOrderParamState::NamedTensor> NaturalGradientParamState::parameter_shaped() {
  return {{"momentum_buffer", &momentum_buffer()}};
}

std::vector<SecondOrderParamState::NamedTensor> NaturalGradientParamState::members() {
  auto all = SecondOrderParamState::members();
  all.insert(all.end(), {{"uses", &uses()},
                         {"use_eps", &use_eps()},
                         {"use_ranks", &use_ranks()},
                         {"use_samples", &use_samples()}});
  return all;
}

std::vector<SecondOrderParamState::NamedList> NaturalGradientParamState::lists() {
  return {{"inputs", &inputs()}, {"output_gradients", &output_gradients()}};
}

// What was captured keeps its dtype.
void NaturalGradientParamState::convert_to(const at::Tensor& param) {
  SecondOrderParamState::convert_to(param);
  for (const auto& [key, list] : lists()) {
    for (at::Tensor& tensor : *list) {
      tensor = tensor.to(param.device());
    }
  }
}

namespace detail {

int64_t KeptBatch::rows() const {
  return given_rows.empty() ? gradients::detail::count_samples(calls).expect_int()
                            : given_rows[0].size(0);
}

int64_t KeptBatch::samples() const { return is_curvature() ? curvature_samples : rows(); }

void scale_gradients(KeptBatch& batch, double factor) {
  std::vector<at::Tensor> gradients;
  for (const LayerCall& call : batch.calls) {
    const at::Tensor& gradient = call.output_gradient;
    gradients.push_back(gradient.to(at::promote_types(gradient.scalar_type(), at::kFloat)));
  }
  const auto scaled = at::_foreach_mul(gradients, factor);
  for (const auto i : c10::irange(scaled.size())) {
    batch.calls[i].output_gradient = scaled[i];
  }
}

void clear_batch(NaturalGradientParamState& state) {
  state.uses({}).use_eps({}).use_ranks({}).use_samples({});
  state.inputs({}).output_gradients({});
}

void write_batch(const KeptBatch& batch, const BatchStates& states) {
  // In float32 where 16 bits may be too few without the scale.
  const auto unscaled = [&](const at::Tensor& gradient) {
    return gradient.to(at::promote_types(gradient.scalar_type(), at::kFloat)) /
           batch.loss_scale.to(gradient.device());
  };
  CopiesInPlace copies;
  std::map<int64_t, std::vector<int64_t>> places_of;  // of the calls of each owner
  for (const auto place : c10::irange(batch.calls.size())) {
    const LayerCall& call = batch.calls[place];
    places_of[call.weight >= 0 ? call.weight : call.bias].push_back(static_cast<int64_t>(place));
  }
  for (const auto i : c10::irange(states.size())) {
    NaturalGradientParamState& state = *states[i];
    const NaturalGradientParamState old = state;
    clear_batch(state);
    const auto found = places_of.find(static_cast<int64_t>(i));
    if (found == places_of.end()) {
      continue;
    }
    const auto& places = found->second;
    const auto count = static_cast<int64_t>(places.size());
    at::Tensor rows = at::empty({count, kRowSize}, at::kLong);
    at::Tensor eps = at::empty({count}, at::kDouble);
    for (const auto j : c10::irange(count)) {
      const LayerCall& call = batch.calls[places[j]];
      const auto row = row_of(call, places[j]);
      std::copy(row.begin(), row.end(), rows.mutable_data_ptr<int64_t>() + j * kRowSize);
      eps.mutable_data_ptr<double>()[j] = call.eps;
      const at::Tensor& gradient = call.output_gradient;
      state.inputs().push_back(copies.add(call.input, old.inputs(), j));
      state.output_gradients().push_back(copies.add(
          batch.loss_scale.defined() ? unscaled(gradient) : gradient, old.output_gradients(), j));
    }
    state.uses(copies.add(rows, {old.uses()}, 0)).use_eps(copies.add(eps, {old.use_eps()}, 0));
    if (batch.ranks > 1) {
      const at::Tensor ranks = at::tensor({batch.rank, batch.ranks}, at::kLong);
      state.use_ranks(copies.add(ranks, {old.use_ranks()}, 0));
    }
    if (batch.is_curvature()) {
      const at::Tensor samples = at::scalar_tensor(batch.curvature_samples, at::kLong);
      state.use_samples(copies.add(samples, {old.use_samples()}, 0));
    }
  }
}

std::shared_ptr<const KeptBatch> read_batch(const BatchStates& states) {
  std::map<int64_t, LayerCall> found;  // by place
  auto batch = std::make_shared<KeptBatch>();
  for (const auto* state : states) {
    if (!state->uses().defined()) {
      continue;
    }
    const at::Tensor rows = state->uses().cpu().contiguous();
    const auto count = static_cast<size_t>(rows.size(0));
    TORCH_CHECK_VALUE(state->use_eps().defined() && state->inputs().size() == count &&
                          state->output_gradients().size() == count,
                      "the state of a parameter has lost a part of the batch in 'uses'; delete the "
                      "state of all parameters to start afresh");
    if (state->use_ranks().defined()) {
      const at::Tensor ranks = state->use_ranks().cpu().contiguous();
      batch->rank = ranks.const_data_ptr<int64_t>()[0];
      batch->ranks = ranks.const_data_ptr<int64_t>()[1];
    }
    if (state->use_samples().defined()) {
      batch->curvature_samples = state->use_samples().item<int64_t>();
    }
    const at::Tensor eps = state->use_eps().cpu().contiguous();
    for (const auto j : c10::irange(rows.size(0))) {
      const int64_t* row = rows.const_data_ptr<int64_t>() + j * kRowSize;
      LayerCall call = gradients::detail::call_from_row(row);
      call.eps = eps.const_data_ptr<double>()[j];
      call.input = state->inputs()[j];
      call.output_gradient = state->output_gradients()[j];
      found.emplace(row[kRowSize - 1], std::move(call));
    }
  }
  if (found.empty()) {
    return nullptr;
  }
  for (auto& [place, call] : found) {
    batch->calls.push_back(std::move(call));
  }
  return batch;
}

void add_saved_room(NaturalGradientParamState& fresh, const NaturalGradientParamState& saved,
                    const at::Tensor& param, int64_t param_count, const std::string& name) {
  const at::Tensor& rows = saved.uses();
  if (!rows.defined() && saved.inputs().empty() && saved.output_gradients().empty()) {
    return;
  }
  TORCH_CHECK_VALUE(rows.defined() && are_calls(rows, param_count), "'uses' of ", name,
                    " must be an int64 tensor [J, ", kRowSize, "] of layers of the optimizer");
  const auto count = static_cast<size_t>(rows.size(0));
  const auto room = [&](const std::vector<at::Tensor>& tensors, size_t j, at::ScalarType dtype) {
    const bool is_there = j < tensors.size() && tensors[j].defined();
    const bool is_floating = at::isFloatingType(dtype);
    if (is_there && tensors[j].is_floating_point() == is_floating) {
      dtype = tensors[j].scalar_type();
    }
    const auto options = at::TensorOptions(dtype).device(param.device());
    return at::empty(is_there ? tensors[j].sizes() : at::IntArrayRef({0}), options);
  };
  fresh.uses(at::empty(rows.sizes(), at::kLong));
  fresh.use_eps(at::empty({rows.size(0)}, at::kDouble));
  if (saved.use_ranks().defined()) {
    fresh.use_ranks(at::empty({2}, at::kLong));
  }
  if (saved.use_samples().defined()) {
    fresh.use_samples(at::empty({}, at::kLong));
  }
  const at::Tensor on_cpu = rows.cpu().contiguous();
  for (const auto j : c10::irange(count)) {
    const auto kind = static_cast<LayerKind>(on_cpu.const_data_ptr<int64_t>()[j * kRowSize]);
    const at::Tensor gradient = room(saved.output_gradients(), j, at::kFloat);
    const at::Tensor input =
        room(saved.inputs(), j, kind == LayerKind::kEmbedding ? at::kLong : at::kFloat);
    auto sizes = input.sizes().vec();
    if (!sizes.empty() && gradient.dim() > 0) {
      sizes[0] = gradient.size(0);  // equally many samples
    }
    fresh.inputs().push_back(at::empty(sizes, input.options()));
    fresh.output_gradients().push_back(gradient);
  }
}

}  // namespace detail
}  // namespace torchium::optim
