// Base of the optimizers whose state is matrices of blocks: Shampoo and full-matrix Adagrad.
#pragma once

#include "torchium/export.h"
#include "torchium/optim/second_order_optimizer.h"

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <optional>
#include <vector>

namespace torchium::optim {

namespace detail {
struct BlockedGroup;
class BlockedPlans;
struct ParameterState;
}  // namespace detail

/// State of one parameter, whose matrices are views of the block storage of its group.
struct TORCHIUM_API MatrixParamState : public SecondOrderParamState {
  /// One tensor per slot (one mode of one block shape): [blocks, n, n] in the state dtype.
  TORCH_ARG(std::vector<at::Tensor>, statistics);
  /// The preconditioners in use, shaped as `statistics`.
  TORCH_ARG(std::vector<at::Tensor>, roots);
  /// Consecutive failed root computations: int32 [blocks] per slot.
  TORCH_ARG(std::vector<at::Tensor>, root_failures);

 public:
  std::vector<NamedList> lists() override;

 protected:
  // Whether these are the same tensor objects as those of the state.
  virtual bool consists_of(const detail::ParameterState& tensors) const;

 private:
  friend class BlockedOptimizer;
  void assign(const detail::ParameterState& tensors);
};

/// Base of the optimizers that step one parameter group at a time.
class TORCHIUM_API BlockedOptimizer : public SecondOrderOptimizer {
 public:
  ~BlockedOptimizer() override;
  BlockedOptimizer(BlockedOptimizer&&) noexcept;
  BlockedOptimizer& operator=(BlockedOptimizer&&) noexcept;

  MemoryReport memory_report() const override;

 protected:
  explicit BlockedOptimizer(std::unique_ptr<Options> defaults);

  // Renews the roots of all parameters that have state.
  void renew_all_roots();
  // Writes changed learning rates to the tensors that captured steps read.
  void sync_learning_rates();
  // The groups with their current state.
  std::vector<detail::BlockedGroup> groups() const;
  detail::BlockedPlans& plans() const;

  virtual c10::intrusive_ptr<detail::BlockedPlans> make_plans() const = 0;

  void take_step() override;
  void withdraw() override;
  void read_reports(bool wait) override;
  void forget_derived() override;
  void after_load() override;
  std::optional<StateMap> whole_state() const override;
  StateList fit_states(size_t group, const Options& options,
                       const StateList& loaded) const override;

 private:
  detail::BlockedGroup group_of(size_t group, const Options& options) const;
  bool is_bound();
  bool adopt_options(size_t group);
  void bind(bool all_with_state);

  struct Runtime;
  std::unique_ptr<Runtime> runtime_;
};

}  // namespace torchium::optim
