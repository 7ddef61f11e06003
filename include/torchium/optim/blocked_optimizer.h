// Optimizers whose state is batches of matrices: Shampoo and full-matrix Adagrad.
#pragma once

#include "torchium/export.h"
#include "torchium/optim/second_order_optimizer.h"

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torchium::optim {

namespace detail {
struct GroupPlans;
struct BlockStorage;
struct ParameterState;
class StepPlan;
}  // namespace detail

/// State of one parameter whose matrices are views of stacks that a group shares.
struct TORCHIUM_API MatrixParamState : public SecondOrderParamState {
  /// One tensor a slot (one mode of one block shape): [blocks, n, n] in the state dtype.
  TORCH_ARG(std::vector<at::Tensor>, statistics);
  /// The preconditioners in use, shaped as `statistics`.
  TORCH_ARG(std::vector<at::Tensor>, roots);
  /// Failed root computations in a row: int32 [blocks] a slot.
  TORCH_ARG(std::vector<at::Tensor>, root_failures);

 public:
  std::vector<std::pair<std::string, at::Tensor>> tensors() const override;
  /// The matrices are converted when they are stacked again.
  bool is_of(const at::Tensor& param) override;
  using SecondOrderParamState::serialize;
  void serialize(torch::serialize::InputArchive& archive) override;

 protected:
  // Whether these are the very tensors of the state.
  virtual bool consists_of(const detail::ParameterState& tensors) const;

 private:
  friend class BlockedOptimizer;
  // What it was made for: layout() of the options, and the shape of the parameter.
  std::string layout_;
  std::vector<int64_t> sizes_;
};

/// Base of the optimizers that step one parameter group at a time.
class TORCHIUM_API BlockedOptimizer : public SecondOrderOptimizer {
 public:
  ~BlockedOptimizer() override;
  BlockedOptimizer(BlockedOptimizer&&) noexcept;
  BlockedOptimizer& operator=(BlockedOptimizer&&) noexcept;

 protected:
  explicit BlockedOptimizer(std::unique_ptr<Options> defaults);

  // Renews the roots of all parameters that have state.
  void renew_all_roots();
  // Scratch memory that captured steps of a group keep, in bytes.
  int64_t graph_bytes(size_t group) const;
  // Writes changed learning rates to the tensors that captured steps read.
  void sync_learning_rates();

  // The options that the shapes and dtypes of the state depend on, as messages name them.
  virtual std::string layout(const Options& options) const = 0;
  // Whether they are equal, the learning rate aside.
  virtual bool equal_but_lr(const Options& a, const Options& b) const = 0;
  // Keys of the parameter-shaped members that a step with these options uses, beside those that are
  // always there.
  virtual std::vector<std::string> needed_buffers(const Options& options) const { return {}; }
  // Whether a parameter-shaped member means something else with these options than before.
  virtual bool begins_afresh(const std::string& key, const Options& before,
                             const Options& options) const {
    return false;
  }
  // Throws c10::ValueError where these options need another kind of state than the parameter has.
  virtual void check_state(const Options& options, const at::Tensor& param,
                           const SecondOrderParamState& state) const {}
  // Initial matrices of `params`.
  virtual detail::BlockStorage init_storage(const Options& options,
                                            at::TensorList params) const = 0;
  virtual c10::intrusive_ptr<detail::StepPlan> make_plan(c10::Device device) const = 0;

  bool state_is_ready(const Options& options, const at::Tensor& param) const override;
  void take_step(const ActiveParams& active) override;
  void read_reports(bool wait) override;
  void forget_derived() override;
  void fit_loaded(const Options& options, const std::vector<at::Tensor>& params,
                  const std::vector<SecondOrderParamState*>& loaded,
                  const std::vector<SecondOrderParamState*>& fitted) const override;

 private:
  bool is_ready(const std::string& needed_layout, const at::Tensor& param) const;
  bool all_ready(size_t group, const std::vector<at::Tensor>& active) const;
  void check_group_states(size_t group, const std::vector<at::Tensor>& active) const;
  void init_group_states(size_t group, const std::vector<at::Tensor>& active);
  void fit_buffers(size_t group, const at::Tensor& param, SecondOrderParamState& state,
                   bool is_new) const;
  bool is_bound();
  bool adopt_options(size_t group);
  bool prepare();
  void keep_host_steps();
  void bind();

  std::unique_ptr<detail::GroupPlans> plans_;
};

}  // namespace torchium::optim
