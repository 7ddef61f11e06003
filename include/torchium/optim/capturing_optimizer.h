// Optimizers that capture layer calls: K-FAC and natural gradient.
#pragma once

#include "torchium/export.h"
#include "torchium/optim/curvature_options.h"
#include "torchium/optim/second_order_optimizer.h"

#include <c10/util/intrusive_ptr.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace torchium::gradients::detail {
class ModelLayers;
class OperatorCapture;
struct DifferentiableCall;
}  // namespace torchium::gradients::detail

namespace torchium::optim {

namespace detail {
class JointPlan;
// Position of the parameter, key, and new value; none: the entry is removed.
using StateChange = std::tuple<int64_t, std::string, std::optional<at::Tensor>>;
}  // namespace detail

/// Base of the optimizers that capture the inputs of layers and the gradients of their outputs.
///
/// Calls of these operators with a parameter are captured, within torch::nn or not: linear (also as
/// addmm, matmul or mm with the weight or its transpose), conv1d to conv3d, conv_transpose1d to
/// conv_transpose3d, embedding, layer_norm, rms_norm and group_norm. Dimension 0 of their input is
/// the sample. Forward passes may run on any thread, and
/// those without a backward pass leave no trace. Several backward passes before a step are
/// micro-batches of one batch. Calls of a layer in one backward pass are positions of the same
/// samples: a batch that goes through the model in parts needs a backward() for each part. Backward
/// passes that reach the same call, as with retain_graph for several losses or with `inputs`, are
/// parts of the gradients of the same samples for NaturalGradient. KFAC counts the samples again,
/// and warns once: add the losses up.
///
/// zero_grad() drops the captured calls, as does every step() that does not throw for a wrong
/// option. Those of a parameter are also dropped when its gradient is set to undefined. All
/// parameters must be on one device.
///
/// Several processes share the steps of an optimizer that has a process_group among its options.
/// Without one, step() throws c10::Error and changes nothing if several processes have exchanged
/// tensors since calls were last dropped: what they capture would not be combined, and their
/// parameters would drift apart. Operators of a c10d::ProcessGroup are detected. A backend that is
/// used without one is not, nor is an exchange while the optimizer does not capture.
class TORCHIUM_API CapturingOptimizer : public SecondOrderOptimizer {
 public:
  ~CapturingOptimizer() override;
  CapturingOptimizer(CapturingOptimizer&&) noexcept;
  CapturingOptimizer& operator=(CapturingOptimizer&&) noexcept;

  /// As SecondOrderOptimizer::step(). It also throws errors that occurred during the capture.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// As Optimizer::zero_grad(). Drops the captured calls.
  void zero_grad(bool set_to_none = true);

  /// As SecondOrderOptimizer::add_param_group().
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// With capturable = true a captured step reads its learning rate from a tensor on the device.
  /// This writes the options' lr to it: call it after a change of lr, before a replay.
  void sync_lr();

  MemoryReport memory_report() const override;

 protected:
  CapturingOptimizer(const torch::nn::Module& model, std::unique_ptr<Options> defaults);

  // For constructors: checks the defaults, adds the groups (or one of all parameters of the
  // model, each once) and begins to capture.
  void initialize(const std::vector<torch::optim::OptimizerParamGroup>& param_groups);
  void initialize_with_model();

  // ---- what an optimizer defines

  virtual c10::intrusive_ptr<detail::JointPlan> make_plan() const = 0;
  // Whether calls of the parameter may be captured.
  virtual bool is_watched(const at::Tensor& param) const { return true; }
  // Whether calls of batch norm are captured, which mix samples in training mode.
  virtual bool takes_batch_norm() const { return false; }
  // Whether the next step needs layer calls.
  virtual bool captures_next() = 0;
  // Throws c10::ValueError for layers that do not allow a step of these parameters.
  virtual void check_layers(const std::vector<at::Tensor>& active) {}
  // Sets options that are functions of the step. Throws, and changes nothing, for a wrong value.
  virtual void follow_schedules() {}
  // Warns about limits of the planned step. Called before anything is changed.
  virtual void announce() {}

  // ---- what it may use

  const gradients::detail::ModelLayers& layers() const { return *layers_; }
  detail::JointPlan& joint_plan() const { return *plan_; }
  // Its name in the model, or its place in the groups.
  std::string name_of(const at::Tensor& param) const;
  std::string describe(size_t group, size_t position) const override;
  std::vector<at::Tensor> all_params() const;
  // The tensors of their states by name; empty: none.
  using NamedStates = std::vector<std::vector<std::pair<std::string, at::Tensor>>>;
  NamedStates tensors_of_states() const;
  bool is_used_otherwise(const at::Tensor& param) const;
  // Whether these backward passes, or one of them, mix samples (OperatorCapture).
  bool mixes_samples(const std::vector<int64_t>& passes) const;
  void bind();                        // the plan, to groups and state
  void adopt_groups();                // the same where something has changed, and its options
  std::vector<int64_t> next_steps();  // JointPlan
  void update_curvature(const at::Tensor& outputs, const std::string& loss,
                        const CurvatureOptions& options = {});
  // Drops the captured calls, and decides what to capture next.
  void forget_captures();

  void take_step() override;
  void withdraw() override;
  StateList fit_states(size_t group, const Options& options,
                       const StateList& loaded) const override;
  void read_reports(bool wait) override;
  void forget_derived() override;

 private:
  // The captured calls that `outputs` depends on.
  std::vector<gradients::detail::DifferentiableCall> calls_of(const at::Tensor& outputs) const;
  bool is_bound() const;
  void prepare_step(const std::vector<at::Tensor>& active);
  std::vector<int64_t> groups_of_params() const;
  void adopt_options();
  void change_states(const std::vector<detail::StateChange>& changes);

  c10::intrusive_ptr<detail::JointPlan> plan_;
  std::unique_ptr<const gradients::detail::ModelLayers> layers_;
  std::unique_ptr<gradients::detail::OperatorCapture> capture_;
  std::vector<int64_t> watched_;  // parameters of the capture, as positions in all_params()
};

}  // namespace torchium::optim
