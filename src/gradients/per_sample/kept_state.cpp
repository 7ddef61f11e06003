#include "gradients/per_sample/kept_state.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>
#include <torch/nn/modules/embedding.h>

#include <memory>
#include <mutex>
#include <set>
#include <string_view>
#include <utility>

namespace torchium::gradients::detail {
namespace {

// Calls restore(), which may throw. For destructors, which reach it only while another error is in
// flight: that one is reported.
template <typename Kept>
void restore_quietly(Kept& kept) noexcept {
  try {
    kept.restore();
  } catch (...) {
  }
}

// An order for std::set.
struct DeviceOrder {
  bool operator()(c10::Device a, c10::Device b) const {
    return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
  }
};

// Whether an operator of this thread was given a generator of random numbers.
thread_local bool took_generator = false;

std::unique_ptr<at::ObserverContext> look_for_generator(const at::RecordFunction& function) {
  for (const auto& input : function.inputs()) {
    took_generator |= input.isGenerator();
  }
  return nullptr;
}

}  // namespace

KeptTensors::KeptTensors(const torch::nn::Module& model) {
  for (const auto& buffer : model.buffers()) {
    keep(buffer);
  }
  keep_table(model);
  for (const auto& module : model.modules(/*include_self=*/false)) {
    keep_table(*module);
  }
}

void KeptTensors::keep_table(const torch::nn::Module& module) {
  const auto* table = dynamic_cast<const torch::nn::EmbeddingImpl*>(&module);
  const auto* bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&module);
  if (table != nullptr && table->options.max_norm()) {
    keep(table->weight);
  } else if (bag != nullptr && bag->options.max_norm()) {
    keep(bag->weight);
  }
}

void KeptTensors::keep(const at::Tensor& tensor) {
  kept_.push_back({tensor, tensor.detach().clone(), tensor._version()});
}

KeptTensors::~KeptTensors() { restore_quietly(*this); }

void KeptTensors::restore() {
  const at::NoGradGuard no_grad;
  for (auto& [tensor, value, version] : kept_) {
    if (tensor._version() != version) {
      tensor.copy_(value);
      version = tensor._version();
    }
  }
}

KeptRandomState::KeptRandomState(at::TensorList tensors) {
  std::set<c10::Device, DeviceOrder> devices{at::kCPU};
  for (const auto& tensor : tensors) {
    devices.insert(tensor.device());
  }
  for (const c10::Device device : devices) {
    generators_.push_back(at::globalContext().defaultGenerator(device));
  }
  states_ = read();
  took_generator = false;
  callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&look_for_generator)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
}

KeptRandomState::~KeptRandomState() {
  at::removeCallback(callback_);
  restore_quietly(*this);
}

void KeptRandomState::restore() {
  for (const auto i : c10::irange(generators_.size())) {
    const std::lock_guard lock(generators_[i].mutex());
    generators_[i].set_state(states_[i]);
  }
}

bool KeptRandomState::has_drawn() {
  if (took_generator) {
    return true;
  }
  const auto now = read();
  for (const auto i : c10::irange(now.size())) {
    if (!at::equal(now[i], states_[i])) {
      return true;
    }
  }
  return false;
}

std::vector<at::Tensor> KeptRandomState::read() {
  std::vector<at::Tensor> states;
  for (auto& generator : generators_) {
    const std::lock_guard lock(generator.mutex());
    states.push_back(generator.get_state());
  }
  return states;
}

thread_local ValueReads* ValueReads::current_ = nullptr;

ValueReads::ValueReads(const torch::nn::Module& model) {
  for (const auto& tensors : {model.buffers(), model.parameters()}) {
    for (const auto& tensor : tensors) {
      if (tensor.has_storage()) {
        own_storages_.insert(tensor.storage().unsafeGetStorageImpl());
      }
    }
  }
  current_ = this;
  callback_ =
      at::addThreadLocalCallback(at::RecordFunctionCallback(&ValueReads::begin, &ValueReads::end)
                                     .needsInputs(true)
                                     .scopes({at::RecordScope::FUNCTION}));
}

ValueReads::~ValueReads() {
  at::removeCallback(callback_);
  current_ = nullptr;
}

// A RECORD_FUNCTION of the program, which has no name of an operator, may surround the model's own
// reads.
std::unique_ptr<at::ObserverContext> ValueReads::begin(const at::RecordFunction& function) {
  if (current_ != nullptr && function.operator_name() && current_->depth_++ == 0) {
    current_->look(function);
  }
  return nullptr;
}

void ValueReads::end(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  if (current_ != nullptr && function.operator_name()) {
    --current_->depth_;
  }
}

void ValueReads::look(const at::RecordFunction& function) {
  static const std::unordered_set<std::string_view> reads{"aten::item", "aten::_local_scalar_dense",
                                                          "aten::is_nonzero", "aten::equal",
                                                          "aten::allclose"};
  if (reads.count(function.name()) == 0) {
    return;
  }
  for (const auto& input : function.inputs()) {
    const bool is_of_batch =
        input.isTensor() && input.toTensor().has_storage() &&
        own_storages_.count(input.toTensor().storage().unsafeGetStorageImpl()) == 0;
    found_ = found_ || is_of_batch;
  }
}

}  // namespace torchium::gradients::detail
