// Base of all optimizers of Torchium: groups, step(), late error reports without synchronisation,
// checkpoints.
#pragma once

#include "torchium/export.h"
#include "torchium/optim/memory_report.h"
#include "torchium/optim/options.h"

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace torchium::optim {

namespace detail {
struct StepReport;
}  // namespace detail

/// State of one parameter that every optimizer of Torchium keeps. Absent tensors are undefined. The
/// state dtype is float64 for float64 parameters, else float32 (also for bfloat16 and float16
/// parameters).
struct TORCHIUM_API SecondOrderParamState : public torch::optim::OptimizerParamState {
  /// Steps taken by this parameter: 0-dim float64 on the parameter's device (float32 would stop at
  /// 2^24).
  TORCH_ARG(at::Tensor, step);

 public:
  /// Checkpoint key and address of a member. Entry i of the list "roots" has the key "roots.i".
  using NamedTensor = std::pair<std::string, at::Tensor*>;
  using NamedList = std::pair<std::string, std::vector<at::Tensor>*>;

  /// The members with the shape of the parameter and the state dtype.
  virtual std::vector<NamedTensor> parameter_shaped() = 0;

  /// The step counts other than `step`.
  virtual std::vector<NamedTensor> counts() { return {}; }

  /// All members, defined or not; checkpoints and archives have no others.
  virtual std::vector<NamedTensor> members();
  virtual std::vector<NamedList> lists() { return {}; }

  /// Converts all members to the device and state dtype of `param`, after it was moved or cast.
  virtual void convert_to(const at::Tensor& param);

  /// Whether convert_to() has nothing to do.
  virtual bool is_of(const at::Tensor& param);

  /// All defined tensors under their checkpoint keys ("step", "statistics.0", "exp_avg", ...).
  /// They share memory with the state.
  std::vector<std::pair<std::string, at::Tensor>> tensors() const;

  /// Sets the member of a checkpoint key; an undefined value removes it. False: no such member.
  bool assign(const std::string& key, const at::Tensor& value);

  /// Whether both hold the same tensor objects.
  bool has_tensors_of(const SecondOrderParamState& other) const;

  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes copies, so that an archive holds no whole buffers and does not follow later steps.
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// Base of the optimizers. All parameters must be dense, real, floating point (float64,
/// float32, bfloat16 or float16).
///
/// A gradient that is not finite, or too large to square (in float32 above 3.3e18 divided by the
/// square root of its elements and steps), skips the whole step of its group (of the group's
/// parameters on the same device, if it has several): parameters and state do not change. The third
/// skipped step in a row raises c10::Error. On a CPU the step itself raises; on a GPU a later step
/// does, without a synchronisation. K-FAC and natural gradient treat all groups as one here. State
/// follows its parameter to another dtype or device.
///
/// An optimizer that was moved from is empty: step() and all other functions that need parameters,
/// options or state throw c10::Error until another optimizer is moved into it.
class TORCHIUM_API SecondOrderOptimizer : public torch::optim::Optimizer {
 public:
  ~SecondOrderOptimizer() override;
  SecondOrderOptimizer(SecondOrderOptimizer&&) noexcept;
  SecondOrderOptimizer& operator=(SecondOrderOptimizer&&) noexcept;

  /// One step of every group. Parameters without a gradient are left alone. `closure` is called
  /// first, with gradients enabled; its result is returned.
  /// Throws c10::ValueError, before any group changes, for invalid options, parameters or
  /// gradients.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Adds a group. Without options it gets the defaults. Throws c10::ValueError, and adds nothing,
  /// for invalid options or parameters and for a parameter that the optimizer already has.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// Waits for the device and raises c10::Error for failures so far. With `capturable` and a
  /// `process_group` all ranks must call it.
  void check_errors();

  /// Bytes that the optimizer holds. Shampoo, Adagrad and AdaHessian count the future state of
  /// parameters that require a gradient but have none yet; the others only state that exists,
  /// because that of a layer follows from its first call. Allocates nothing.
  virtual MemoryReport memory_report() const = 0;

  /// Writes the options and the state of all parameters, as libtorch's optimizers do.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Replaces options and state. Throws c10::ValueError, and loads nothing, unless the archive
  /// holds the same numbers of groups and parameters, and tensors of fitting shapes and dtypes.
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  using Options = torch::optim::OptimizerOptions;
  using StateList = std::vector<std::unique_ptr<SecondOrderParamState>>;

  explicit SecondOrderOptimizer(std::unique_ptr<Options> defaults);

  // For constructors: checks the defaults and adds the groups.
  void initialize(const std::vector<torch::optim::OptimizerParamGroup>& param_groups);

  // ---- what an optimizer defines

  // Throws c10::ValueError for options of the groups that contradict each other: here for a
  // process_group that is not that of the optimizer.
  virtual void check_together(const std::vector<const Options*>& groups) const;
  virtual std::unique_ptr<SecondOrderParamState> make_empty_state() const = 0;
  // One step of all groups; creates missing state. Throws before it changes anything.
  virtual void take_step() = 0;
  // Called instead of take_step() after an error: ranks that share the step raise too.
  virtual void withdraw() = 0;
  // States of the parameters of a group, with what `loaded` has from an archive; null: none. Throws
  // c10::ValueError for what does not fit.
  virtual StateList fit_states(size_t group, const Options& options,
                               const StateList& loaded) const = 0;
  // What an archive holds besides options and the state of parameters. read_more() checks it and
  // returns the action that replaces what is there, called once everything is checked.
  virtual void save_more(torch::serialize::OutputArchive& archive) const {}
  virtual std::function<void()> read_more(torch::serialize::InputArchive& archive) {
    return nullptr;
  }
  // The state of all parameters for an archive, if that is not the one that is kept.
  using StateMap = std::decay_t<decltype(std::declval<torch::optim::Optimizer>().state())>;
  virtual std::optional<StateMap> whole_state() const { return std::nullopt; }
  // Raises for the first failure of the steps that are known to be done; of all steps after a wait.
  virtual void read_reports(bool wait) = 0;
  // Drops everything that can be rebuilt from groups and state.
  virtual void forget_derived() = 0;
  // Called when options and states of all groups have been replaced.
  virtual void after_load() {}
  // Failed roots of one matrix in a row after which a step raises.
  virtual int64_t max_root_failures(const Options& options) const { return 3; }
  // Of the optimizer: "Shampoo".
  virtual const char* name() const = 0;

  // ---- helpers

  // Options of this optimizer; c10::ValueError for those of another.
  const OwnOptions& own_options(const Options& options) const;
  // The ranks that share its steps; null: none.
  static std::shared_ptr<const distributed::Communicator> ranks_of(const Options& options);
  SecondOrderParamState* find_state(const at::Tensor& param) const;
  // Throws c10::Error if this optimizer was moved from.
  void refuse_moved_from() const;
  // "parameter 1 of group 0"
  std::string place_of(const at::Tensor& param) const;
  // Its name in the model; empty: unknown.
  virtual std::string name_in_model(const at::Tensor& param) const { return ""; }
  // "parameter 1 of group 0 (shape [3, 4])"
  virtual std::string describe(size_t group, size_t position) const;
  void check_groups() const;
  // Raises for one report of a group, if that is a failure.
  void raise_failure(size_t group, const detail::StepReport& report) const;

 private:
  std::vector<const Options*> options_of_groups() const;
  void check_group(const Options& options, const std::vector<at::Tensor>& params,
                   size_t group) const;
  // Its group and position.
  std::optional<std::pair<size_t, size_t>> find_place(const at::Tensor& param) const;
  // Replaces the options and states of all groups; does not throw.
  void replace_all(std::vector<std::unique_ptr<Options>> options, std::vector<StateList> states);
};

}  // namespace torchium::optim
