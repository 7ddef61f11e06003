#include "optim/kfac/factors/factor_averages.h"

#include "optim/blocked/elementwise.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace torchium::optim::detail {
namespace {

// The average, in a dtype that holds both; itself if it does.
at::Tensor widened(const at::Tensor& average, const at::Tensor& sum) {
  return average.to(at::promote_types(average.scalar_type(), sum.scalar_type()));
}
void narrow_(at::Tensor& average, const at::Tensor& wide) {
  if (!wide.is_same(average)) {
    average.copy_(wide);
  }
}

}  // namespace

void update_averages(std::initializer_list<FactorAverage> averages, at::Tensor updates,
                     double stat_decay, const FoundInfGuard& guard) {
  if (guard.skipped_on_host()) {
    return;
  }
  if (updates.is_cpu()) {
    updates.add_(1);
    const double d = std::min(1.0 - 1.0 / updates.item<double>(), stat_decay);
    for (auto [average, sum, scale] : averages) {
      at::Tensor wide = widened(average, sum);
      scale_and_add_(wide, d, sum.to(wide.scalar_type()), (1.0 - d) * scale);
      narrow_(average, wide);
    }
    return;
  }
  guard.advance(updates);
  const at::Tensor k = updates.to(at::kDouble).clamp_min_(1.0);
  const at::Tensor d = (1.0 - k.reciprocal()).clamp_max_(stat_decay);
  const at::Tensor weight = guard.zero_if_skipped(1.0 - d);
  for (auto [average, sum, scale] : averages) {
    const at::Tensor wide = widened(average, sum);
    const at::Tensor value = guard.zero_if_skipped(sum).to(wide.scalar_type()) * scale;
    wide.lerp_(value, weight.to(wide.scalar_type()));
    narrow_(average, wide);
  }
}

}  // namespace torchium::optim::detail
