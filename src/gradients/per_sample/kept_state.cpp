#include "gradients/per_sample/kept_state.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>

#include <memory>
#include <mutex>
#include <set>
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

KeptBuffers::KeptBuffers(const torch::nn::Module& model) {
  for (const auto& buffer : model.buffers()) {
    kept_.push_back({buffer, buffer.detach().clone(), buffer._version()});
  }
}

KeptBuffers::~KeptBuffers() { restore_quietly(*this); }

void KeptBuffers::restore() {
  const at::NoGradGuard no_grad;
  for (auto& [buffer, value, version] : kept_) {
    if (buffer._version() != version) {
      buffer.copy_(value);
      version = buffer._version();
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

}  // namespace torchium::gradients::detail
