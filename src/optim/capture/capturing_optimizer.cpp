#include "torchium/optim/capturing_optimizer.h"

#include "gradients/capture/model_layers.h"
#include "optim/core/group_runtime.h"
#include "optim/core/joint_step.h"
#include "support/stream_capture.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <utility>

namespace torchium::optim {

CapturingOptimizer::CapturingOptimizer(const torch::nn::Module& model,
                                       std::unique_ptr<Options> defaults)
    : SecondOrderOptimizer(std::move(defaults)),
      layers_(std::make_unique<gradients::detail::ModelLayers>(model)) {}

CapturingOptimizer::~CapturingOptimizer() = default;
CapturingOptimizer::CapturingOptimizer(CapturingOptimizer&&) noexcept = default;
CapturingOptimizer& CapturingOptimizer::operator=(CapturingOptimizer&&) noexcept = default;

void CapturingOptimizer::initialize(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups) {
  SecondOrderOptimizer::initialize(param_groups);
  forget_captures();
}

void CapturingOptimizer::initialize_with_model() {
  std::vector<at::Tensor> params;
  for (const auto& [param, place] : layers_->parameters()) {
    if (param.requires_grad()) {
      params.push_back(param);
    }
  }
  initialize({torch::optim::OptimizerParamGroup(std::move(params))});
}

void CapturingOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& param_group) {
  SecondOrderOptimizer::add_param_group(param_group);
  forget_captures();
}

at::Tensor CapturingOptimizer::step(LossClosure closure) {
  refuse_moved_from();
  at::Tensor loss;
  try {
    loss = SecondOrderOptimizer::step(std::move(closure));
  } catch (...) {
    forget_captures();
    throw;
  }
  forget_captures();
  return loss;
}

void CapturingOptimizer::zero_grad(bool set_to_none) {
  refuse_moved_from();
  SecondOrderOptimizer::zero_grad(set_to_none);
  forget_captures();
}

void CapturingOptimizer::take_step() {
  check_groups();
  detail::JointStep step;
  for (const auto group : c10::irange(param_groups_.size())) {
    const Options& options = param_groups_[group].options();
    const at::Tensor lr = at::scalar_tensor(options.get_lr(), at::kDouble);
    for (const auto& param : params_with_gradient(group)) {
      TORCH_CHECK(!torchium::detail::is_capturing(param.device()),
                  "step() cannot be captured in a CUDA graph: the host decides in it what is "
                  "captured");
      step.positions.emplace(param.unsafeGetTensorImpl(), step.params.size());
      step.params.push_back(param);
      step.options.push_back(&options);
      step.lrs.push_back(lr);
    }
  }
  for (const auto& param : step.params) {
    TORCH_CHECK_VALUE(param.device() == step.params.front().device(), describe(param), " is on ",
                      param.device(), " and ", describe(step.params.front()), " on ",
                      step.params.front().device(),
                      "; all parameters must be on one device: use one optimizer a device");
  }
  if (!step.params.empty()) {
    take_joint_step(step);
  }
}

void CapturingOptimizer::refuse_processes(int64_t processes) const {
  TORCH_CHECK(processes <= 1, processes,
              " processes have exchanged tensors, but what they capture is not combined yet, so "
              "that their parameters would drift apart; train in one process");
}

std::vector<at::Tensor> CapturingOptimizer::all_params() const {
  std::vector<at::Tensor> params;
  for (const auto& group : param_groups_) {
    params.insert(params.end(), group.params().begin(), group.params().end());
  }
  return params;
}

std::vector<int64_t> CapturingOptimizer::steps_taken(const std::vector<at::Tensor>& params) const {
  std::vector<SecondOrderParamState*> states;
  for (const auto& param : params) {
    if (auto* state = find_state(param)) {
      states.push_back(state);
    }
  }
  const auto known = host_steps(states);
  auto next = known.begin();
  std::vector<int64_t> result;
  for (const auto& param : params) {
    result.push_back(find_state(param) == nullptr ? 0 : *next++);
  }
  return result;
}

std::string CapturingOptimizer::name_of(const at::Tensor& param) const {
  const auto* place = layers_->find(param);
  return place != nullptr ? place->name : place_of(param);
}

std::string CapturingOptimizer::describe(const at::Tensor& param) const {
  const auto* place = param.defined() ? layers_->find(param) : nullptr;
  const std::string position = SecondOrderOptimizer::describe(param);
  return place != nullptr ? "'" + place->name + "', " + position : position;
}

const char* CapturingOptimizer::root_remedy() const { return "raise damping or lower lr"; }

}  // namespace torchium::optim
