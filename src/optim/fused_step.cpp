#include "optim/fused_step.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/shampoo_step.h"
#include "optim/kernel_tables.h"
#include "optim/parameter_entries.h"
#include "optim/step_products.h"
#include "optim/step_stacks.h"
#include "optim/step_status.h"
#include "support/device_code.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <cstddef>
#include <limits>
#include <optional>
#endif

#include <algorithm>

namespace torchium::optim::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

using cuda_kernels::ParameterEntry;
using cuda_kernels::ScanEntry;
using cuda_kernels::ScanKind;
using cuda_kernels::StepControl;
using cuda_kernels::StepEntry;
using cuda_kernels::StepNumbers;
using cuda_kernels::TileGrid;
using linalg::detail::MatmulPrecision;

static_assert(kConsecutiveSkips == 0 && kTotalSkips == 1 && kNonFiniteParameter == 2 &&
                  kConsecutiveRootFailures == 3 && kFailedParameter == 4,
              "cuda_kernels/step_control.cu writes these places");
static_assert(sizeof(StepControl) % sizeof(int) == 0);
static_assert(sizeof(StepNumbers) == 4 * sizeof(double));

void changed(const at::Tensor& tensor) {
  if (tensor.defined()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace

struct FusedStep::Work {
  const ShampooHyperparameters& h;
  at::TensorList params;
  const std::vector<Blocking>& blockings;
  ShampooState& state;
  const std::vector<bool>& serves;
  cudaStream_t stream;
  MatmulPrecision precision;
  at::TensorOptions options;  // of float32 buffers
  std::vector<ElementwiseState> elementwise;

  std::vector<at::Tensor> grads = {};  // as the kernels read them
  at::Tensor control = {};             // StepControl
  at::Tensor numbers = {};             // [P, 4]: StepNumbers
  std::vector<ParameterEntry> entries = {};
  KernelTables<ParameterEntry> tables = {};
  const std::vector<MatrixBatch>* batches = nullptr;  // of the whole step
  std::optional<StepStacks> stacks = {};
  at::Tensor grafted_squares = {}, direction_squares = {};  // [tiles]

  StepControl* device_control() const {
    return reinterpret_cast<StepControl*>(control.mutable_data_ptr<int>());
  }
  StepNumbers* device_numbers() const {
    return reinterpret_cast<StepNumbers*>(numbers.mutable_data_ptr<double>());
  }
  StepProducts products() const { return {*batches, *stacks, precision, stream}; }
  // One of StepNumbers, of the parameters that are not served or of all.
  std::vector<StepScalar> number(int64_t place, bool of_all) const {
    std::vector<StepScalar> scalars(params.size());
    for (size_t i = 0; i < params.size(); ++i) {
      if (of_all || !serves[i]) {
        scalars[i].device = numbers.select(0, static_cast<int64_t>(i)).select(0, place);
      }
    }
    return scalars;
  }

  cuda_kernels::StepBuffers buffers() const {
    const auto floats = [](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr;
    };
    cuda_kernels::StepBuffers buffers{};
    buffers.control = device_control();
    buffers.numbers = device_numbers();
    buffers.grafted_squares = floats(grafted_squares);
    buffers.direction_squares = floats(direction_squares);
    stacks->fill(buffers);
    return buffers;
  }

  void scan_all();
};

// All gradients, and with L2 weight decay the parameters; where operands are halves also the
// averages, which bound them.
void FusedStep::Work::scan_all() {
  KernelTables<ScanEntry> table;
  const auto add = [&](const at::Tensor& tensor, size_t i, ScanKind kind, double largest) {
    const int64_t tiles = (tensor.numel() + cuda_kernels::kScanTile - 1) / cuda_kernels::kScanTile;
    if (tiles > 0) {
      table.add({.data = tensor.const_data_ptr(),
                 .elements = tensor.numel(),
                 .first_tile = 0,
                 .index = static_cast<int>(i),
                 .type = element_type(tensor.scalar_type()),
                 .kind = kind,
                 .step = state.steps[i].const_data_ptr<double>(),
                 .largest = largest},
                static_cast<int>(tiles));
    }
  };
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].is_non_overlapping_and_dense()) {
      grads[i] = grads[i].contiguous();
    }
    if (entries[i].in_halves != 0 && h.beta1 > 0.0) {
      add(state.exp_avgs[i], i, ScanKind::kAverage, std::numeric_limits<double>::infinity());
    }
  }
  const std::vector<double> weight_decays(params.size(), step_rule(h).weight_decay);
  for (const Examined& each : examined_gradients(params, grads, state.steps, weight_decays)) {
    const bool is_gradient = each.tensor.is_same(grads[each.param]);
    const at::Tensor dense =
        each.tensor.is_non_overlapping_and_dense() ? each.tensor : each.tensor.contiguous();
    add(dense, each.param, is_gradient ? ScanKind::kGradient : ScanKind::kParameter, each.largest);
  }
  for (const auto& part : table) {
    C10_CUDA_CHECK(cuda_kernels::scan(part, device_control(), stream));
  }
}

FusedStep::FusedStep(const ShampooHyperparameters& h, at::TensorList params, at::TensorList grads,
                     const std::vector<Blocking>& blockings, ShampooState& state)
    : serves_(params.size(), false) {
  if (!params[0].is_cuda()) {
    return;
  }
  torchium::detail::check_device_code(params[0].device());
  work_ = std::make_unique<Work>(
      Work{h, params, blockings, state, serves_, c10::cuda::getCurrentCUDAStream(),
           linalg::detail::matmul_precision(h.matmul_precision),
           params[0].options().dtype(at::kFloat), elementwise_states(h, blockings, state)});
  for (size_t i = 0; i < params.size(); ++i) {
    serves_[i] = has_entry(h, params[i], blockings[i], work_->elementwise[i]);
    work_->grads.push_back(readable_gradient(grads[i], params[i], serves_[i]));
  }
}

FusedStep::~FusedStep() = default;

StepGate FusedStep::begin(const std::vector<MatrixBatch>& batches) {
  RECORD_FUNCTION("torchium::elementwise", {});
  Work& w = *work_;
  w.entries.resize(w.params.size());
  w.batches = &batches;
  w.stacks.emplace(batches, serves_, w.h.block_size, w.precision, w.options, w.h.beta1 > 0.0);
  w.stacks->place(w.entries);
  w.control = at::empty({sizeof(StepControl) / sizeof(int)}, w.options.dtype(at::kInt));
  w.numbers = at::empty({static_cast<int64_t>(w.params.size()), 4}, w.options.dtype(at::kDouble));
  C10_CUDA_CHECK(cuda_kernels::initialize_control(w.device_control(), w.stream));
  w.scan_all();
  const auto rule = step_rule(w.h);
  changed(w.state.status);
  C10_CUDA_CHECK(cuda_kernels::decide_step(rule, w.device_control(),
                                           w.state.status.mutable_data_ptr<int64_t>(), w.stream));
  KernelTables<StepEntry> steps;
  const auto start = [](const std::vector<at::Tensor>& starts, size_t i) {
    return starts.empty() ? nullptr : starts[i].const_data_ptr<double>();
  };
  for (size_t i = 0; i < w.params.size(); ++i) {
    steps.add({w.state.steps[i].mutable_data_ptr<double>(), start(w.state.exp_avg_starts, i),
               start(w.state.second_moment_starts, i)},
              1);
    changed(w.state.steps[i]);
  }
  for (const auto& table : steps) {
    C10_CUDA_CHECK(
        cuda_kernels::advance_steps(rule, table, w.device_control(), w.device_numbers(), w.stream));
  }
  return StepGate::of(w.control.view(at::kBool).select(0, offsetof(StepControl, keep)));
}

Corrections FusedStep::corrections(bool statistics) const {
  return {.exp_avg = work_->number(0, false),
          .second_moment = work_->number(1, false),
          .statistics = work_->number(2, statistics)};
}

void FusedStep::gather() {
  if (!is_available()) {
    return;
  }
  RECORD_FUNCTION("torchium::elementwise", {});
  Work& w = *work_;
  w.stacks->set_aside();
  for (size_t i = 0; i < w.params.size(); ++i) {
    if (!serves_[i] || w.params[i].numel() == 0) {
      continue;
    }
    ParameterEntry& entry = w.entries[i];
    fill_entry(entry, w.h, w.params[i], w.grads[i], w.blockings[i], w.elementwise[i]);
    entry.index = static_cast<int>(i);
    w.tables.add(entry, TileGrid(entry.rows, entry.columns, kernel_block_size(w.h)).tiles);
    for (const at::Tensor& state : w.elementwise[i].all()) {
      changed(state);
    }
  }
  if (w.h.grafting.has_value()) {
    w.grafted_squares = at::empty({w.tables.tiles()}, w.options);
    w.direction_squares = at::empty({w.tables.tiles()}, w.options);
  }
  for (const auto& table : w.tables) {
    C10_CUDA_CHECK(gather_gradients(element_rule(w.h), table, w.buffers(), w.stream));
  }
}

void FusedStep::update_statistics() {
  if (!is_available()) {
    return;
  }
  RECORD_FUNCTION("torchium::statistics", {});
  const Work& w = *work_;
  w.products().update_statistics(w.device_control());
  for (const MatrixBatch& batch : *w.batches) {
    for (const at::Tensor& statistics : batch.statistics) {
      changed(statistics);
    }
  }
}

void FusedStep::precondition() {
  if (!is_available()) {
    return;
  }
  RECORD_FUNCTION("torchium::precondition", {});
  const Work& w = *work_;
  work_->stacks->set_aside_directions();
  StepControl* control = w.device_control();
  w.products().precondition(w.h.beta1 > 0.0 ? &control->average_scale : &control->gradient_scale);
}

void FusedStep::update() {
  if (!is_available()) {
    return;
  }
  RECORD_FUNCTION("torchium::elementwise", {});
  const Work& w = *work_;
  const auto rule = element_rule(w.h);
  const auto buffers = w.buffers();
  const at::Tensor lr = w.h.lr.scalar_type() == at::kDouble ? w.h.lr : w.h.lr.to(at::kFloat);
  const cuda_kernels::LearningRate rate{lr.is_cpu() ? nullptr : lr.const_data_ptr(),
                                        lr.scalar_type() == at::kDouble,
                                        lr.is_cpu() ? lr.item<double>() : 0.0};
  for (const auto& table : w.tables) {
    if (w.h.grafting.has_value()) {
      C10_CUDA_CHECK(sum_directions(rule, table, buffers, w.stream));
    }
    C10_CUDA_CHECK(update_parameters(rule, table, buffers, rate, w.stream));
  }
  for (size_t i = 0; i < w.params.size(); ++i) {
    if (serves_[i]) {
      changed(w.params[i]);
    }
  }
}

#else

struct FusedStep::Work {};

FusedStep::FusedStep(const ShampooHyperparameters&, at::TensorList params, at::TensorList,
                     const std::vector<Blocking>&, ShampooState&)
    : serves_(params.size(), false) {}
FusedStep::~FusedStep() = default;

namespace {
[[noreturn]] void refuse() { TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels"); }
}  // namespace

StepGate FusedStep::begin(const std::vector<MatrixBatch>& batches) { refuse(); }
Corrections FusedStep::corrections(bool) const { refuse(); }
void FusedStep::gather() {}
void FusedStep::update_statistics() {}
void FusedStep::precondition() {}
void FusedStep::update() {}
#endif

bool FusedStep::serves_all() const {
  return std::find(serves_.begin(), serves_.end(), false) == serves_.end();
}

}  // namespace torchium::optim::detail
