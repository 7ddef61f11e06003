// Shampoo as a replacement for AdamW.
#include "optim/shampoo/shampoo_options.h"
#include "torchium/optim/shampoo.h"

#include <memory>
#include <utility>

namespace torchium::optim {
namespace {

using torch::optim::OptimizerParamGroup;

ShampooOptions options_beside_adamw() {
  return ShampooOptions()
      .grafting("adam")
      .exponent(-0.5)
      .exponent_warmup(100)
      .relative_eps(1e-3)
      .update_freq(10);
}

template <typename AdamOptions>
ShampooOptions adopt(const AdamOptions& adam, bool decoupled_weight_decay) {
  TORCH_CHECK_VALUE(!adam.amsgrad(), "amsgrad=True is not supported by Shampoo; use amsgrad=False");
  const auto wrong = detail::find_wrong("eps", adam.eps(), detail::Number{});
  TORCH_CHECK_VALUE(!wrong, "eps must be ", wrong->requirement, ", got ", wrong->value);
  // (a + eps^2)^(-1/2) of the diagonal rule is close to Adam's 1 / (sqrt(a) + eps).
  return options_beside_adamw()
      .lr(adam.lr())
      .betas(adam.betas())
      .eps(adam.eps() * adam.eps())
      .grafting_eps(adam.eps())
      .weight_decay(adam.weight_decay())
      .decoupled_weight_decay(decoupled_weight_decay);
}

ShampooOptions adopt(const torch::optim::OptimizerOptions& options) {
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&options)) {
    return ShampooOptions::from_adamw(*adamw);
  }
  const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(&options);
  TORCH_CHECK_VALUE(adam != nullptr,
                    "options of a parameter group must be AdamWOptions or AdamOptions");
  return ShampooOptions::from_adamw(*adam);
}

ShampooOptions adjusted(ShampooOptions options, const Shampoo::AdjustOptions& adjust) {
  if (adjust) {
    adjust(options);
  }
  return options;
}

Shampoo adopt(const std::vector<OptimizerParamGroup>& groups, ShampooOptions defaults,
              const Shampoo::AdjustOptions& adjust) {
  std::vector<OptimizerParamGroup> adopted;
  for (const auto& group : groups) {
    adopted.emplace_back(group.params(),
                         std::make_unique<ShampooOptions>(adjusted(
                             group.has_options() ? adopt(group.options()) : defaults, adjust)));
  }
  return Shampoo(adopted, adjusted(std::move(defaults), adjust));
}

}  // namespace

ShampooOptions ShampooOptions::from_adamw(const torch::optim::AdamWOptions& adamw) {
  return adopt(adamw, /*decoupled_weight_decay=*/true);
}

ShampooOptions ShampooOptions::from_adamw(const torch::optim::AdamOptions& adam) {
  return adopt(adam, /*decoupled_weight_decay=*/false);
}

Shampoo Shampoo::from_adamw(const torch::optim::AdamW& optimizer, const AdjustOptions& adjust) {
  return adopt(optimizer.param_groups(), adopt(optimizer.defaults()), adjust);
}

Shampoo Shampoo::from_adamw(const torch::optim::Adam& optimizer, const AdjustOptions& adjust) {
  return adopt(optimizer.param_groups(), adopt(optimizer.defaults()), adjust);
}

Shampoo Shampoo::from_adamw(const std::vector<OptimizerParamGroup>& param_groups,
                            const torch::optim::AdamWOptions& defaults,
                            const AdjustOptions& adjust) {
  return adopt(param_groups, ShampooOptions::from_adamw(defaults), adjust);
}

Shampoo Shampoo::from_adamw(std::vector<at::Tensor> params,
                            const torch::optim::AdamWOptions& defaults,
                            const AdjustOptions& adjust) {
  return from_adamw({OptimizerParamGroup(std::move(params))}, defaults, adjust);
}

Shampoo Shampoo::from_adamw(const torch::nn::Module& model,
                            const torch::optim::AdamWOptions& defaults,
                            const AdjustOptions& adjust) {
  return Shampoo(model, adjusted(ShampooOptions::from_adamw(defaults), adjust));
}

}  // namespace torchium::optim
