// KFACPreconditioner's plan: that of K-FAC, whose directions replace the gradients.
#pragma once

#include "optim/kfac/kfac_plan.h"
#include "optim/kfac/kfac_preconditioner_options.h"

namespace torchium::optim::detail {

class KfacPreconditionerPlan : public KfacPlan {
 public:
  const char* optimizer_name() const override { return "KFACPreconditioner"; }

 protected:
  // Also refuses gradients that cannot be written to.
  void check(const std::vector<size_t>& active) override;
  bool writes_gradients() const override { return true; }
  std::string fallback_note(const std::string& names) const override {
    return "It leaves the gradients as they are for " + names + ". report() names all of them";
  }
  KFACOptions own_options(const torch::optim::OptimizerOptions& group) const override {
    return kfac_options(options_as<KFACPreconditionerOptions>(group, optimizer_name()));
  }
};

}  // namespace torchium::optim::detail
