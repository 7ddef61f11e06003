#include "optim/shampoo/shampoo_sharing.h"

#include "optim/shampoo/cuda/shampoo_kernels.h"
#include "optim/shampoo/shampoo_options.h"
#include "optim/shampoo/shampoo_plan.h"
#include "optim/shampoo/shampoo_rules.h"

#include <memory>
#include <string_view>
#include <utility>

namespace torchium::optim::detail {
namespace {

const ShampooOptions& shampoo(const torch::optim::OptimizerOptions& options) {
  return static_cast<const ShampooOptions&>(options);
}

// Kinds of blocks are the rules of parameters.
class ShampooSharing : public SharingRules {
 public:
  bool capturable(const Options& options) const override { return shampoo(options).capturable(); }

  OptionTexts all_options(const Options& options) const override {
    OptionTexts texts;
    for_each_option(shampoo(options), [&](const auto& option) {
      if (std::string_view(option.name) != "lr") {
        texts.emplace_back(option.name, text_of(option.value));
      }
    });
    return texts;
  }

  size_t kinds() const override { return 3; }
  size_t kind(const Options& options, at::IntArrayRef shape) const override {
    return static_cast<size_t>(rule_of_shape(shampoo(options), shape));
  }

  Blocking blocking(const Options& options, at::IntArrayRef shape) const override {
    return shampoo_blocking(shampoo(options), shape);
  }

  // Grafting takes the norms of blocks of the flat parameter.
  int64_t unit(const Options& options, size_t kind) const override {
    return kind == static_cast<size_t>(ParameterRule::kDiagonal) ? shampoo(options).block_size()
                                                                 : 0;
  }

  bool updates_in_place(size_t kind, at::IntArrayRef sizes) const override {
    return has_kernel_shape(static_cast<ParameterRule>(kind), sizes);
  }

  int64_t root_interval(const Options& options) const override {
    return shampoo(options).update_freq();
  }

  std::shared_ptr<const Options> options_of_blocks(const Options& options,
                                                   size_t kind) const override {
    auto own = std::make_shared<ShampooOptions>(shampoo(options));
    const auto rule = static_cast<ParameterRule>(kind);
    own->weight_decay(0.0)
        .decoupled_weight_decay(false)
        .maximize(false)
        .max_preconditioned_dim(std::nullopt)
        .preconditioned(rule != ParameterRule::kGrafted)
        .preconditioner_1d(rule == ParameterRule::kMatrices ? "full" : "diagonal");
    return own;
  }

  bool maximize(const Options& options) const override { return shampoo(options).maximize(); }
  double l2_penalty(const Options& options) const override {
    return detail::l2_penalty(shampoo(options));
  }

  double decoupled_decay(const Options& options) const override {
    return detail::decoupled_decay(shampoo(options));
  }
};

}  // namespace

c10::intrusive_ptr<BlockedPlans> make_shared_shampoo_plans(distributed::Communicator ranks,
                                                           const SharingOptions& options) {
  return c10::make_intrusive<SharedPlans>(
      "Shampoo", [](c10::Device device) { return c10::make_intrusive<ShampooPlan>(device); },
      [](c10::Device device) { return c10::make_intrusive<ShampooPlan>(device, Role::kDirection); },
      std::make_unique<ShampooSharing>(), std::move(ranks), options);
}

}  // namespace torchium::optim::detail
