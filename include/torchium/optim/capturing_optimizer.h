// Optimizers that watch the layers of a model at work: K-FAC and natural gradient.
#pragma once

#include "torchium/export.h"
#include "torchium/optim/second_order_optimizer.h"

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace torchium::gradients::detail {
class ModelLayers;
}

namespace torchium::optim {

namespace detail {
struct JointStep;
}  // namespace detail

/// Base of the optimizers that capture what layers receive and the gradients of what they return.
///
/// Any use of a parameter by these operators is captured, within torch::nn or not: linear (also as
/// addmm, matmul or mm with the transpose of the weight), conv2d, embedding, layer_norm and
/// group_norm. Dimension 0 of their input is the sample. Forward passes may run on any threads, and
/// those without a backward pass leave no trace. Several backward passes before a step are
/// micro-batches of one batch.
///
/// What was captured is dropped by every step(), by zero_grad(), and for a parameter whose gradient
/// was set to undefined since. All parameters must be on one device.
///
/// step() throws c10::Error, and changes nothing, if several processes have exchanged tensors since
/// the captures were last dropped: what they capture is not combined, so that their parameters
/// would drift apart. Seen are the operators of a c10d::ProcessGroup. Not seen is a backend that is
/// used without a c10d::ProcessGroup, nor an exchange while the optimizer does not capture.
class TORCHIUM_API CapturingOptimizer : public SecondOrderOptimizer {
 public:
  ~CapturingOptimizer() override;
  CapturingOptimizer(CapturingOptimizer&&) noexcept;
  CapturingOptimizer& operator=(CapturingOptimizer&&) noexcept;

  /// As SecondOrderOptimizer::step(). It also throws what went wrong while the layers were watched.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// As Optimizer::zero_grad(), and drops what was captured.
  void zero_grad(bool set_to_none = true);

  /// As SecondOrderOptimizer::add_param_group().
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

 protected:
  CapturingOptimizer(const torch::nn::Module& model, std::unique_ptr<Options> defaults);

  // For constructors: checks the defaults, adds the groups (or one of all trainable parameters,
  // each once) and begins to capture.
  void initialize(const std::vector<torch::optim::OptimizerParamGroup>& param_groups);
  void initialize_with_model();

  // ---- what an optimizer defines

  // Checks and takes a step of all parameters; changes nothing if it throws c10::ValueError.
  virtual void take_joint_step(const detail::JointStep& step) = 0;
  // Drops what was captured, and decides what to capture next.
  virtual void forget_captures() = 0;

  // ---- what it may use

  const gradients::detail::ModelLayers& layers() const { return *layers_; }
  // Its name in the model, or its place in the groups.
  std::string name_of(const at::Tensor& param) const;
  std::string describe(const at::Tensor& param) const override;
  std::vector<at::Tensor> all_params() const;
  // Steps each parameter has taken; 0 without state.
  std::vector<int64_t> steps_taken(const std::vector<at::Tensor>& params) const;

  // Throws c10::Error if `processes`, that have exchanged tensors, are several.
  void refuse_processes(int64_t processes) const;

  void take_step() override;
  const char* root_remedy() const override;

 private:
  std::unique_ptr<const gradients::detail::ModelLayers> layers_;
};

}  // namespace torchium::optim
