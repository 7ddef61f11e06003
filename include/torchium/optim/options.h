// Base of the options of all optimizers.
#pragma once

#include "torchium/export.h"

#include <c10/util/intrusive_ptr.h>
#include <torch/optim/optimizer.h>

#include <memory>

namespace c10d {
class ProcessGroup;
}
namespace torchium::distributed {
class Communicator;
}

namespace torchium::optim {

/// What an optimizer asks of its options, whatever their type.
struct TORCHIUM_API OwnOptions {
  virtual ~OwnOptions() = default;
  /// Throws c10::ValueError for a wrong option or combination of options.
  virtual void check() const = 0;
  /// Whether options of the same type are equal apart from the learning rate.
  virtual bool equals_but_lr(const torch::optim::OptimizerOptions& other) const = 0;
};

/// Checks, archives, comparison and learning rate of the options `Derived` of an optimizer.
template <typename Derived>
struct TORCHIUM_API OptionsOf : public torch::optim::OptimizerCloneableOptions<Derived>,
                                public OwnOptions {
  void check() const override;
  bool equals_but_lr(const torch::optim::OptimizerOptions& other) const override;
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(const double lr) override;
  friend bool operator==(const Derived& lhs, const Derived& rhs) { return lhs.equals(rhs); }

 private:
  bool equals(const Derived& other) const;
};

/// Part of the options of an optimizer whose steps the ranks of a process group can share.
class TORCHIUM_API SharedOptions {
 public:
  /// Null: none.
  const std::shared_ptr<const distributed::Communicator>& ranks() const { return ranks_; }

 protected:
  void set_ranks(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

 private:
  std::shared_ptr<const distributed::Communicator> ranks_;
};

}  // namespace torchium::optim
