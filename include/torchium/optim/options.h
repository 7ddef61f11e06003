// Base of the options of all optimizers.
#pragma once

#include "torchium/export.h"

#include <torch/optim/optimizer.h>

namespace torchium::optim {

/// Archives, comparison and learning rate of the options `Derived` of an optimizer.
template <typename Derived>
struct TORCHIUM_API OptionsOf : public torch::optim::OptimizerCloneableOptions<Derived> {
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(const double lr) override;
  friend bool operator==(const Derived& lhs, const Derived& rhs) { return lhs.equals(rhs); }

 private:
  bool equals(const Derived& other) const;
};

}  // namespace torchium::optim
