#include "optim/shampoo/cuda/fused_step.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/optimizer_step/shampoo_step.h"
#include "optim/blocked/cuda/block_products.h"
#include "optim/blocked/cuda/block_workspace.h"
#include "optim/core/cuda/device_check.h"
#include "optim/core/cuda/kernel_tables.h"
#include "optim/shampoo/cuda/parameter_entries.h"
#include "support/device_code.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>
#include <optional>
#include <utility>
#endif

#include <algorithm>

namespace torchium::optim::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

using cuda_kernels::ParameterEntry;
using cuda_kernels::ScanKind;
using cuda_kernels::TileGrid;
using linalg::detail::MatmulPrecision;

constexpr size_t kNone = std::numeric_limits<size_t>::max();  // instead of an entry

at::Tensor dense(at::Tensor tensor) {
  return tensor.is_non_overlapping_and_dense() ? std::move(tensor) : tensor.contiguous();
}

}  // namespace

struct FusedStep::Work {
  // A gradient as the kernels last read it.
  struct SeenGradient {
    const void* data = nullptr;
    at::ScalarType type = at::kFloat;
  };
  // One parameter in the tables.
  struct Places {
    size_t entry = kNone;
    bool by_fours = false;       // its entry, whatever the gradient
    SeenGradient gradient = {};  // in the tables
  };

  const std::vector<at::Tensor>& params;
  const std::vector<Blocking>& blockings;
  const ShampooState& state;
  const std::vector<bool>& supports;
  at::TensorOptions options;  // of float32 buffers
  std::vector<ElementwiseState> elementwise;
  DeviceCheck check;
  const std::vector<MatrixBatch>* batches = nullptr;  // of all parameters

  // What serves every step.
  std::vector<Places> places = {};
  KernelTables<ParameterEntry> tables = {};
  std::optional<BlockWorkspace> storage = {};

  // What one step needs.
  const ShampooHyperparameters* h = nullptr;
  cudaStream_t stream = nullptr;
  MatmulPrecision precision = MatmulPrecision::kHighest;
  std::vector<at::Tensor> grads = {};                       // as the kernels read them
  at::Tensor grafted_squares = {}, direction_squares = {};  // [tiles]

  BlockProducts products() const { return {*batches, *storage, precision, stream}; }
  // One of StepNumbers, of the parameters that are not served or of all.
  std::vector<StepScalar> number(int64_t place, bool of_all) const {
    std::vector<StepScalar> scalars(params.size());
    for (size_t i = 0; i < params.size(); ++i) {
      if (of_all || !supports[i]) {
        scalars[i].device = check.number(i, place);
      }
    }
    return scalars;
  }

  cuda_kernels::StepBuffers buffers() const {
    const auto floats = [](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr;
    };
    cuda_kernels::StepBuffers buffers{};
    buffers.control = check.control();
    buffers.numbers = check.numbers();
    buffers.grafted_squares = floats(grafted_squares);
    buffers.direction_squares = floats(direction_squares);
    storage->fill(buffers);
    return buffers;
  }

  void plan_entry(const ShampooHyperparameters& rules, size_t i, ParameterEntry& entry);
  void plan_check(const ShampooHyperparameters& rules, size_t i, bool scans_average);
  void set_gradient(size_t i, at::Tensor grad);
};

void FusedStep::Work::plan_entry(const ShampooHyperparameters& rules, size_t i,
                                 ParameterEntry& entry) {
  if (!supports[i] || params[i].numel() == 0) {
    return;
  }
  fill_entry(entry, rules, params[i], blockings[i], elementwise[i]);
  entry.index = static_cast<int>(i);
  const int tiles = TileGrid(entry.rows, entry.columns, kernel_block_size(rules)).tiles;
  places[i].entry = tables.add(entry, tiles);
  places[i].by_fours = entry.by_fours;
}

// Where operands are fp16 parts the average bounds them.
void FusedStep::Work::plan_check(const ShampooHyperparameters& rules, size_t i,
                                 bool scans_average) {
  const auto start = [&](const std::vector<at::Tensor>& starts) {
    return starts.empty() ? at::Tensor() : starts[i];
  };
  check.add_parameter(params[i], step_rule(rules).weight_decay, state.steps[i],
                      {start(state.exp_avg_starts), start(state.second_moment_starts)});
  if (scans_average) {
    check.add_scan(state.exp_avgs[i], i, ScanKind::kAverage,
                   std::numeric_limits<double>::infinity(), nullptr);
  }
}

// Writes to the tables what changes from step to step.
void FusedStep::Work::set_gradient(size_t i, at::Tensor grad) {
  Places& place = places[i];
  const SeenGradient seen{grad.const_data_ptr(), grad.scalar_type()};
  if (seen.data != place.gradient.data || seen.type != place.gradient.type) {
    place.gradient = seen;
    check.set_gradient(i, grad);
    if (place.entry != kNone) {
      detail::set_gradient(tables[place.entry], grad, place.by_fours);
    }
  }
  grads[i] = std::move(grad);
}

FusedStep::FusedStep(const ShampooHyperparameters& h, const std::vector<at::Tensor>& params,
                     const std::vector<Blocking>& blockings, const ShampooState& state)
    : supports_(params.size(), false) {
  if (!params[0].is_cuda()) {
    return;
  }
  torchium::detail::check_device_code(params[0].device());
  work_ = std::make_unique<Work>(Work{params, blockings, state, supports_,
                                      params[0].options().dtype(at::kFloat).requires_grad(false),
                                      elementwise_states(h, blockings, state),
                                      DeviceCheck(params[0].options().requires_grad(false))});
  for (size_t i = 0; i < params.size(); ++i) {
    supports_[i] = is_supported(h, params[i], blockings[i], work_->elementwise[i]);
  }
  supports_all_ = std::find(supports_.begin(), supports_.end(), false) == supports_.end();
}

void FusedStep::plan(const ShampooHyperparameters& h, const std::vector<MatrixBatch>& batches) {
  if (!is_available()) {
    return;
  }
  Work& w = *work_;
  const size_t count = w.params.size();
  std::vector<ParameterEntry> entries(count);
  w.places.resize(count);
  w.grads.resize(count);
  w.batches = &batches;
  w.storage.emplace(batches, supports_, h.block_size, w.options, h.beta1 > 0.0);
  w.storage->place(entries);
  for (size_t i = 0; i < count; ++i) {
    w.plan_check(h, i, h.beta1 > 0.0 && entries[i].in_fp16 != 0);
    w.plan_entry(h, i, entries[i]);
  }
}

// cuBLAS allocates memory for each stream that it is first used on.
bool FusedStep::fits_graphs() const {
  if (!supports_all_) {
    return false;
  }
  const Work& w = *work_;
  for (size_t b = 0; b < w.batches->size(); ++b) {
    if (!w.storage->is_split(b)) {
      return false;
    }
  }
  return true;
}

void FusedStep::begin(const ShampooHyperparameters& h, at::TensorList grads,
                      const at::Tensor& found_inf) {
  RECORD_FUNCTION("torchium::elementwise", {});
  Work& w = *work_;
  w.h = &h;
  w.stream = c10::cuda::getCurrentCUDAStream();
  w.precision = linalg::detail::matmul_precision(h.matmul_precision);
  for (size_t i = 0; i < grads.size(); ++i) {
    w.set_gradient(i, dense(readable_gradient(grads[i], w.params[i], supports_[i])));
  }
  w.check.run(step_rule(h), w.state.status, w.stream, found_inf);
}

FoundInfGuard FusedStep::guard() const { return work_->check.guard(); }

Corrections FusedStep::corrections(bool statistics) const {
  Corrections corrections;
  if (!supports_all_) {
    corrections.exp_avg = work_->number(0, false);
    corrections.second_moment = work_->number(1, false);
  }
  if (!supports_all_ || statistics) {
    corrections.statistics = work_->number(2, statistics);
  }
  return corrections;
}

void FusedStep::gather() {
  if (!is_available()) {
    return;
  }
  RECORD_FUNCTION("torchium::elementwise", {});
  Work& w = *work_;
  w.storage->set_aside(w.precision);
  if (w.h->grafting.has_value()) {
    w.grafted_squares = at::empty({w.tables.tiles()}, w.options);
    w.direction_squares = at::empty({w.tables.tiles()}, w.options);
  }
  for (const auto& table : w.tables) {
    C10_CUDA_CHECK(gather_gradients(element_rule(*w.h), table, w.buffers(), w.stream));
  }
  for (size_t i = 0; i < w.params.size(); ++i) {
    if (w.places[i].entry != kNone) {
      for (const at::Tensor* state : w.elementwise[i].all()) {
        note_change(*state);
      }
    }
  }
}

void FusedStep::update_statistics() {
  if (!is_available()) {
    return;
  }
  RECORD_FUNCTION("torchium::statistics", {});
  const Work& w = *work_;
  w.products().update_statistics(w.check.control());
  for (const MatrixBatch& batch : *w.batches) {
    for (const at::Tensor& statistics : batch.statistics) {
      note_change(statistics);
    }
  }
}

void FusedStep::precondition() {
  if (!is_available()) {
    return;
  }
  RECORD_FUNCTION("torchium::precondition", {});
  const Work& w = *work_;
  work_->storage->set_aside_directions();
  w.products().precondition();
}

void FusedStep::update() {
  if (!is_available()) {
    return;
  }
  RECORD_FUNCTION("torchium::elementwise", {});
  const Work& w = *work_;
  const auto rule = element_rule(*w.h);
  const auto buffers = w.buffers();
  const at::Tensor lr = readable_learning_rate(w.h->lr);
  for (const auto& table : w.tables) {
    if (w.h->grafting.has_value()) {
      C10_CUDA_CHECK(sum_directions(rule, table, buffers, w.stream));
    }
    C10_CUDA_CHECK(update_parameters(rule, table, buffers, learning_rate(lr), w.stream));
  }
  for (size_t i = 0; i < w.params.size(); ++i) {
    if (supports_[i]) {
      note_change(w.params[i]);
    }
  }
}

void FusedStep::end() {
  if (!is_available()) {
    return;
  }
  Work& w = *work_;
  std::fill(w.grads.begin(), w.grads.end(), at::Tensor());
  w.check.end();
  w.grafted_squares = w.direction_squares = at::Tensor();
  w.storage->free_all();
}

#else

struct FusedStep::Work {};

FusedStep::FusedStep(const ShampooHyperparameters&, const std::vector<at::Tensor>& params,
                     const std::vector<Blocking>&, const ShampooState&)
    : supports_(params.size(), false) {}

namespace {
[[noreturn]] void refuse() { TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels"); }
}  // namespace

bool FusedStep::fits_graphs() const { return false; }

void FusedStep::plan(const ShampooHyperparameters&, const std::vector<MatrixBatch>&) {}
void FusedStep::begin(const ShampooHyperparameters&, at::TensorList, const at::Tensor&) {
  refuse();
}
FoundInfGuard FusedStep::guard() const { refuse(); }
Corrections FusedStep::corrections(bool) const { refuse(); }
void FusedStep::gather() {}
void FusedStep::update_statistics() {}
void FusedStep::precondition() {}
void FusedStep::update() {}
void FusedStep::end() {}
#endif

FusedStep::~FusedStep() = default;

}  // namespace torchium::optim::detail
