#ifdef TORCHIUM_WITH_CUDA
#include "optim/core/cuda/device_check.h"

#include "support/device_code.h"
#include "support/stream_capture.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace torchium::optim::detail {

using cuda_kernels::ScanEntry;
using cuda_kernels::ScanKind;
using cuda_kernels::StepControl;
using cuda_kernels::StepNumbers;

static_assert(sizeof(StepControl) % sizeof(int) == 0);
static_assert(sizeof(StepNumbers) % sizeof(double) == 0);
constexpr int64_t kNumbers = sizeof(StepNumbers) / sizeof(double);

namespace {

// Adds an entry unless it is empty. Returns its number.
std::optional<size_t> add(KernelTables<ScanEntry>& scans, const ScanEntry& entry) {
  const int64_t tiles = (entry.elements + cuda_kernels::kScanTile - 1) / cuda_kernels::kScanTile;
  return tiles == 0 ? std::nullopt : std::optional(scans.add(entry, static_cast<int>(tiles)));
}

ScanEntry scan_entry(const at::Tensor& tensor, size_t param, ScanKind kind, double largest,
                     const double* step) {
  const bool is_strided = tensor.dim() == 1 && tensor.stride(0) != 1;  // a diagonal
  return {.data = tensor.const_data_ptr(),
          .elements = tensor.numel(),
          .first_tile = 0,
          .index = static_cast<int>(param),
          .type = element_type(tensor.scalar_type()),
          .kind = kind,
          .step = step,
          .largest = largest,
          .columns = is_strided ? 1 : 0,
          .row_stride = is_strided ? tensor.stride(0) : 0};
}

void launch_scans(const KernelTables<ScanEntry>& scans, StepControl* control, StepNumbers* numbers,
                  cudaStream_t stream) {
  for (const auto& table : scans) {
    C10_CUDA_CHECK(cuda_kernels::scan(table, control, numbers, stream));
  }
}

// found_inf: one number; undefined: 0.
void launch_decision(const StepRule& rule, StepControl* control, const at::Tensor& found_inf,
                     at::Tensor& status, cudaStream_t stream) {
  const at::Tensor overflow =
      found_inf.defined() ? found_inf.to(status.options().dtype(at::kFloat)) : at::Tensor();
  C10_CUDA_CHECK(cuda_kernels::decide_step(
      rule, control, overflow.defined() ? overflow.const_data_ptr<float>() : nullptr,
      status.mutable_data_ptr<int64_t>(), stream));
  note_change(status);
}

at::Tensor keep_of(const at::Tensor& control) {
  return control.view(at::kBool).select(0, offsetof(StepControl, keep));
}

}  // namespace

at::Tensor record_skip_by_kernels(const std::vector<Examined>& examined, at::Tensor& status,
                                  const at::Tensor& found_inf) {
  const auto options = status.options().requires_grad(false);
  const c10::DeviceGuard device_guard(options.device());
  torchium::detail::check_device_code(options.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  std::vector<at::Tensor> readable;  // until all is launched
  KernelTables<ScanEntry> scans;
  size_t params = 1;
  for (const Examined& each : examined) {
    const bool is_readable = each.tensor.dim() == 1 || each.tensor.is_non_overlapping_and_dense();
    const at::Tensor tensor = is_readable ? each.tensor : each.tensor.contiguous();
    readable.push_back(tensor);
    const double* step = nullptr;
    if (each.steps.defined()) {
      readable.push_back(each.steps.to(options.dtype(at::kDouble)));
      step = readable.back().const_data_ptr<double>();
    }
    add(scans, scan_entry(tensor, each.param, ScanKind::kGradient, each.largest, step));
    params = std::max(params, each.param + 1);
  }
  KernelTables<cuda_kernels::GradientEntry> none;
  for (size_t i = 0; i < params; ++i) {
    none.add({}, 1);
  }
  const at::Tensor control =
      at::empty({sizeof(StepControl) / sizeof(int)}, options.dtype(at::kInt));
  const at::Tensor memory =
      at::empty({static_cast<int64_t>(params), kNumbers}, options.dtype(at::kDouble));
  auto* its = reinterpret_cast<StepControl*>(control.mutable_data_ptr<int>());
  auto* numbers = reinterpret_cast<StepNumbers*>(memory.mutable_data_ptr<double>());
  for (const auto& table : none) {
    C10_CUDA_CHECK(cuda_kernels::initialize_control(table, its, numbers, stream));
  }
  launch_scans(scans, its, numbers, stream);
  launch_decision({}, its, found_inf, status, stream);
  return keep_of(control);
}

DeviceCheck::DeviceCheck(at::TensorOptions options, at::Tensor status)
    : options_(options.requires_grad(false)), status_(std::move(status)) {
  torchium::detail::check_device_code(options.device());
}

void DeviceCheck::add_scan(const at::Tensor& tensor, size_t param, ScanKind kind, double largest,
                           const double* step) {
  add(scans_, scan_entry(tensor, param, kind, largest, step));
}

void DeviceCheck::examine(const at::Tensor& tensor, size_t param, double largest) {
  add(examined_, scan_entry(tensor, param, ScanKind::kGradient, largest, nullptr));
}

void DeviceCheck::add_parameter(const at::Tensor& param, double weight_decay,
                                const at::Tensor& step, const Starts& starts) {
  const auto number = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr<double>() : nullptr;
  };
  const GradientLimits limits = gradient_limits(param, weight_decay);
  const int64_t elements = param.numel();
  ScanEntry entry{.data = nullptr,
                  .elements = elements,
                  .first_tile = 0,
                  .index = static_cast<int>(params_.size()),
                  .type = cuda_kernels::ElementType::kFloat,
                  .kind = ScanKind::kGradient,
                  .step = number(step),
                  .largest = limits.gradient};
  Parameter added{param, step};
  added.gradient_scan = add(scans_, entry);
  if (limits.has_parameter) {
    entry.data = param.const_data_ptr();
    entry.type = element_type(param.scalar_type());
    entry.kind = ScanKind::kParameter;
    entry.largest = limits.parameter;
    const auto scan = add(scans_, entry);
    added.copied_scan = param.is_non_overlapping_and_dense() ? std::nullopt : scan;
  }
  addresses_.add({}, 1);
  steps_.add(
      {step.mutable_data_ptr<double>(), number(starts.exp_avg), number(starts.second_moment)}, 1);
  params_.push_back(std::move(added));
}

DeviceCheck::Memory DeviceCheck::allocate() const {
  const auto count = static_cast<int64_t>(params_.size());
  return {at::empty({sizeof(StepControl) / sizeof(int)}, options_.dtype(at::kInt)),
          at::empty({count, kNumbers}, options_.dtype(at::kDouble))};
}

// A capture of the caller outlives this: what it reads comes from the memory of its graph.
void DeviceCheck::set_aside() {
  if (torchium::detail::is_capturing(options_.device())) {
    memory_ = allocate();
    return;
  }
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  if (!kept_.control.defined()) {
    kept_ = allocate();
  } else if (stream_ != stream) {
    kept_.control.record_stream(stream);
    kept_.numbers.record_stream(stream);
  }
  stream_ = stream;
  memory_ = kept_;
}

void DeviceCheck::begin(at::TensorList grads) {
  kinds_.clear();
  for (size_t i = 0; i < params_.size(); ++i) {
    const Parameter& each = params_[i];
    const unsigned* known = known_.empty() ? nullptr : known_[i];
    const bool by_rows = each.reads_rows && known != nullptr && has_rows_apart(grads[i]);
    const bool as_it_is = by_rows || is_readable(grads[i], each.param, each.is_updated);
    const at::Tensor& grad =
        as_it_is ? grads[i]
                 : readable_.emplace_back(readable_gradient(grads[i], each.param, each.is_updated));
    const int64_t row_stride = by_rows ? grad.stride(0) : 0;
    kinds_.push_back(
        {element_type(grad.scalar_type()), aligned_to_four(grad) && row_stride % 4 == 0});
    addresses_[i] = {grad.const_data_ptr(), row_stride, known};
    if (each.gradient_scan) {
      scans_[*each.gradient_scan].type = kinds_[i].type;
    }
  }
  set_aside();
  for (const auto& table : addresses_) {
    C10_CUDA_CHECK(cuda_kernels::initialize_control(table, control(), numbers(),
                                                    c10::cuda::getCurrentCUDAStream()));
  }
}

void DeviceCheck::add_to(GraphKey& key) const {
  for (const GradientKind kind : kinds_) {
    key.push_back(kind.in_key());
  }
}

bool DeviceCheck::run(const StepRule& rule, const at::Tensor& found_inf) {
  rule_ = rule;
  const auto examined = std::exchange(examined_, {});  // a failed capture is followed by a launch
  copies_.clear();
  for (const Parameter& each : params_) {
    if (each.copied_scan) {
      copies_.push_back(each.param.contiguous());
      scans_[*each.copied_scan].data = copies_.back().const_data_ptr();
    }
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  launch_scans(scans_, control(), numbers(), stream);
  launch_scans(examined, control(), numbers(), stream);
  launch_decision(rule, control(), found_inf, status_, stream);
  for (const auto& table : steps_) {
    C10_CUDA_CHECK(cuda_kernels::advance_steps(rule, table, control(), numbers(), stream));
  }
  for (const Parameter& each : params_) {
    note_change(each.step);
  }
  return true;
}

void DeviceCheck::end() {
  readable_.clear();
  copies_.clear();
  memory_ = {};
}

FoundInfGuard DeviceCheck::guard() const { return FoundInfGuard::of(keep_of(memory_.control)); }

StepControl* DeviceCheck::control() const {
  return reinterpret_cast<StepControl*>(memory_.control.mutable_data_ptr<int>());
}

StepNumbers* DeviceCheck::numbers() const {
  return reinterpret_cast<StepNumbers*>(memory_.numbers.mutable_data_ptr<double>());
}

// StepNumbers begins with them, in the order of Average.
StepScalar DeviceCheck::correction(Average average, size_t param) const {
  const double betas[] = {rule_.beta1, rule_.moment_beta, rule_.beta2};
  const auto place = static_cast<int64_t>(average);
  if (betas[place] == 1.0) {
    return {};
  }
  return {1.0, memory_.numbers.select(0, static_cast<int64_t>(param)).select(0, place)};
}

}  // namespace torchium::optim::detail
#endif
