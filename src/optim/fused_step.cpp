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
#include <utility>
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
constexpr int64_t kNumbers = sizeof(StepNumbers) / sizeof(double);
static_assert(sizeof(StepNumbers) % sizeof(double) == 0);

void changed(const at::Tensor& tensor) {
  if (tensor.defined()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

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
  // Entries of one parameter in the tables.
  struct Places {
    size_t gradient_scan = kNone, param_scan = kNone, entry = kNone;
    bool by_fours = false;       // its entry, whatever the gradient
    SeenGradient gradient = {};  // in the tables
  };

  const std::vector<at::Tensor>& params;
  const std::vector<Blocking>& blockings;
  const ShampooState& state;
  const std::vector<bool>& serves;
  at::TensorOptions options;  // of float32 buffers
  std::vector<ElementwiseState> elementwise;
  const std::vector<MatrixBatch>* batches = nullptr;  // of all parameters

  // What serves every step.
  std::vector<Places> places = {};
  KernelTables<ScanEntry> scans = {};
  KernelTables<StepEntry> steps = {};
  KernelTables<ParameterEntry> tables = {};
  std::optional<StepStacks> stacks = {};

  // What one step needs.
  const ShampooHyperparameters* h = nullptr;
  cudaStream_t stream = nullptr;
  MatmulPrecision precision = MatmulPrecision::kHighest;
  std::vector<at::Tensor> grads = {};                       // as the kernels read them
  std::vector<at::Tensor> copies = {};                      // of parameters that are not dense
  at::Tensor control = {};                                  // StepControl
  at::Tensor numbers = {};                                  // [P, kNumbers]: StepNumbers
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

  void plan_entry(const ShampooHyperparameters& rules, size_t i, ParameterEntry& entry);
  void plan_scans(const ShampooHyperparameters& rules, size_t i, bool scans_average);
  void plan_step(size_t i);
  void set_gradient(size_t i, at::Tensor grad);
};

void FusedStep::Work::plan_entry(const ShampooHyperparameters& rules, size_t i,
                                 ParameterEntry& entry) {
  if (!serves[i] || params[i].numel() == 0) {
    return;
  }
  fill_entry(entry, rules, params[i], blockings[i], elementwise[i]);
  entry.index = static_cast<int>(i);
  const int tiles = TileGrid(entry.rows, entry.columns, kernel_block_size(rules)).tiles;
  places[i].entry = tables.add(entry, tiles);
  places[i].by_fours = entry.by_fours;
}

// The gradient, and with L2 weight decay the parameter; where operands are halves also the average,
// which bounds them.
void FusedStep::Work::plan_scans(const ShampooHyperparameters& rules, size_t i,
                                 bool scans_average) {
  const int64_t elements = params[i].numel();
  if (elements == 0) {
    return;
  }
  const auto add = [&](const void* data, at::ScalarType type, ScanKind kind, double largest) {
    const int64_t tiles = (elements + cuda_kernels::kScanTile - 1) / cuda_kernels::kScanTile;
    return scans.add({.data = data,
                      .elements = elements,
                      .first_tile = 0,
                      .index = static_cast<int>(i),
                      .type = element_type(type),
                      .kind = kind,
                      .step = state.steps[i].const_data_ptr<double>(),
                      .largest = largest},
                     static_cast<int>(tiles));
  };
  if (scans_average) {
    const at::Tensor& average = state.exp_avgs[i];
    add(average.const_data_ptr(), average.scalar_type(), ScanKind::kAverage,
        std::numeric_limits<double>::infinity());
  }
  const GradientLimits limits = gradient_limits(params[i], step_rule(rules).weight_decay);
  places[i].gradient_scan = add(nullptr, at::kFloat, ScanKind::kGradient, limits.gradient);
  if (limits.has_parameter) {
    const at::Tensor& param = params[i];
    const size_t scan =
        add(param.const_data_ptr(), param.scalar_type(), ScanKind::kParameter, limits.parameter);
    places[i].param_scan = param.is_non_overlapping_and_dense() ? kNone : scan;
  }
}

void FusedStep::Work::plan_step(size_t i) {
  const auto start = [&](const std::vector<at::Tensor>& starts) {
    return starts.empty() ? nullptr : starts[i].const_data_ptr<double>();
  };
  steps.add({state.steps[i].mutable_data_ptr<double>(), start(state.exp_avg_starts),
             start(state.second_moment_starts)},
            1);
}

// Writes to the tables what changes from step to step.
void FusedStep::Work::set_gradient(size_t i, at::Tensor grad) {
  Places& place = places[i];
  const SeenGradient seen{grad.const_data_ptr(), grad.scalar_type()};
  if (place.gradient_scan != kNone &&
      (seen.data != place.gradient.data || seen.type != place.gradient.type)) {
    place.gradient = seen;
    scans[place.gradient_scan].data = seen.data;
    scans[place.gradient_scan].type = element_type(seen.type);
    if (place.entry != kNone) {
      detail::set_gradient(tables[place.entry], grad, place.by_fours);
    }
  }
  if (place.param_scan != kNone) {
    copies.push_back(params[i].contiguous());
    scans[place.param_scan].data = copies.back().const_data_ptr();
  }
  grads[i] = std::move(grad);
}

FusedStep::FusedStep(const ShampooHyperparameters& h, const std::vector<at::Tensor>& params,
                     const std::vector<Blocking>& blockings, const ShampooState& state)
    : serves_(params.size(), false) {
  if (!params[0].is_cuda()) {
    return;
  }
  torchium::detail::check_device_code(params[0].device());
  work_ = std::make_unique<Work>(Work{params, blockings, state, serves_,
                                      params[0].options().dtype(at::kFloat).requires_grad(false),
                                      elementwise_states(h, blockings, state)});
  for (size_t i = 0; i < params.size(); ++i) {
    serves_[i] = has_entry(h, params[i], blockings[i], work_->elementwise[i]);
  }
  serves_all_ = std::find(serves_.begin(), serves_.end(), false) == serves_.end();
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
  w.stacks.emplace(batches, serves_, h.block_size, w.options, h.beta1 > 0.0);
  w.stacks->place(entries);
  for (size_t i = 0; i < count; ++i) {
    w.plan_scans(h, i, h.beta1 > 0.0 && entries[i].in_halves != 0);
    w.plan_step(i);
    w.plan_entry(h, i, entries[i]);
  }
}

// cuBLAS allocates memory for each stream that it is first used on.
bool FusedStep::fits_graphs() const {
  if (!serves_all_) {
    return false;
  }
  const Work& w = *work_;
  for (size_t b = 0; b < w.batches->size(); ++b) {
    if (!w.stacks->is_of_halves(b)) {
      return false;
    }
  }
  return true;
}

void FusedStep::begin(const ShampooHyperparameters& h, at::TensorList grads) {
  RECORD_FUNCTION("torchium::elementwise", {});
  Work& w = *work_;
  w.h = &h;
  w.stream = c10::cuda::getCurrentCUDAStream();
  w.precision = linalg::detail::matmul_precision(h.matmul_precision);
  for (size_t i = 0; i < grads.size(); ++i) {
    w.set_gradient(i, dense(readable_gradient(grads[i], w.params[i], serves_[i])));
  }
  w.control = at::empty({sizeof(StepControl) / sizeof(int)}, w.options.dtype(at::kInt));
  const auto count = static_cast<int64_t>(w.params.size());
  w.numbers = at::empty({count, kNumbers}, w.options.dtype(at::kDouble));
  C10_CUDA_CHECK(cuda_kernels::initialize_control(w.device_control(), w.device_numbers(),
                                                  static_cast<int>(count), w.stream));
  for (const auto& table : w.scans) {
    C10_CUDA_CHECK(cuda_kernels::scan(table, w.device_control(), w.device_numbers(), w.stream));
  }
  const auto rule = step_rule(h);
  changed(w.state.status);
  C10_CUDA_CHECK(cuda_kernels::decide_step(rule, w.device_control(),
                                           w.state.status.mutable_data_ptr<int64_t>(), w.stream));
  for (const auto& table : w.steps) {
    C10_CUDA_CHECK(
        cuda_kernels::advance_steps(rule, table, w.device_control(), w.device_numbers(), w.stream));
  }
  for (const at::Tensor& step : w.state.steps) {
    changed(step);
  }
}

StepGate FusedStep::gate() const {
  return StepGate::of(work_->control.view(at::kBool).select(0, offsetof(StepControl, keep)));
}

Corrections FusedStep::corrections(bool statistics) const {
  Corrections corrections;
  if (!serves_all_) {
    corrections.exp_avg = work_->number(0, false);
    corrections.second_moment = work_->number(1, false);
  }
  if (!serves_all_ || statistics) {
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
  w.stacks->set_aside(w.precision);
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
        changed(*state);
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
  const at::Tensor lr = w.h->lr.scalar_type() == at::kDouble ? w.h->lr : w.h->lr.to(at::kFloat);
  const cuda_kernels::LearningRate rate{lr.is_cpu() ? nullptr : lr.const_data_ptr(),
                                        lr.scalar_type() == at::kDouble,
                                        lr.is_cpu() ? lr.item<double>() : 0.0};
  for (const auto& table : w.tables) {
    if (w.h->grafting.has_value()) {
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

void FusedStep::end() {
  if (!is_available()) {
    return;
  }
  Work& w = *work_;
  std::fill(w.grads.begin(), w.grads.end(), at::Tensor());
  w.copies.clear();
  w.control = w.numbers = w.grafted_squares = w.direction_squares = at::Tensor();
  w.stacks->free_all();
}

#else

struct FusedStep::Work {};

FusedStep::FusedStep(const ShampooHyperparameters&, const std::vector<at::Tensor>& params,
                     const std::vector<Blocking>&, const ShampooState&)
    : serves_(params.size(), false) {}

namespace {
[[noreturn]] void refuse() { TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels"); }
}  // namespace

bool FusedStep::fits_graphs() const { return false; }

void FusedStep::plan(const ShampooHyperparameters&, const std::vector<MatrixBatch>&) {}
void FusedStep::begin(const ShampooHyperparameters&, at::TensorList) { refuse(); }
StepGate FusedStep::gate() const { refuse(); }
Corrections FusedStep::corrections(bool) const { refuse(); }
void FusedStep::gather() {}
void FusedStep::update_statistics() {}
void FusedStep::precondition() {}
void FusedStep::update() {}
void FusedStep::end() {}
#endif

FusedStep::~FusedStep() = default;

}  // namespace torchium::optim::detail
