// Shampoo of a model, the rules of its parameters and their report.
#include "optim/shampoo/shampoo_options.h"
#include "optimizer_testing.h"
#include "torchium/optim/shampoo.h"

#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace torchium::testing {
namespace {

using optim::ParameterReport;
using optim::Shampoo;
using optim::ShampooOptions;
using optim::ShampooReport;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

struct TiedWeight : torch::nn::Module {
  explicit TiedWeight(torch::Tensor weight) { register_parameter("weight", std::move(weight)); }
};

// An embedding tied to a head, a bag, a linear layer and a frozen one.
struct TiedModelImpl : torch::nn::Module {
  TiedModelImpl() {
    tokens = register_module("tokens", torch::nn::Embedding(20, 6));
    bag = register_module("bag", torch::nn::EmbeddingBag(9, 6));
    linear = register_module("linear", torch::nn::Linear(6, 5));
    frozen = register_module("frozen", torch::nn::Linear(6, 5));
    register_module("head", std::make_shared<TiedWeight>(tokens->weight));
    for (auto& param : frozen->parameters()) {
      param.requires_grad_(false);
    }
  }
  torch::nn::Embedding tokens{nullptr};
  torch::nn::EmbeddingBag bag{nullptr};
  torch::nn::Linear linear{nullptr}, frozen{nullptr};
};
TORCH_MODULE(TiedModel);

std::map<std::string, ParameterReport> by_name(const ShampooReport& report) {
  std::map<std::string, ParameterReport> result;
  for (const auto& parameter : report.parameters) {
    result[parameter.name] = parameter;
  }
  return result;
}

TEST(ShampooOfAModel, GivesEmbeddingsAGroupOfTheirOwn) {
  const TiedModel model;
  const Shampoo optimizer(*model, ShampooOptions(0.5));
  ASSERT_EQ(optimizer.param_groups().size(), 2);
  const auto& embeddings = optimizer.param_groups()[1].params();
  ASSERT_EQ(embeddings.size(), 2);
  EXPECT_TRUE(embeddings[0].is_same(model->tokens->weight));
  EXPECT_TRUE(embeddings[1].is_same(model->bag->weight));
  EXPECT_EQ(optimizer.param_groups()[0].params().size(), 4);
  EXPECT_TRUE(options_of<ShampooOptions>(optimizer, 0).preconditioned());
  EXPECT_EQ(options_of<ShampooOptions>(optimizer, 1), ShampooOptions(0.5).preconditioned(false));
  const torch::nn::Linear plain(3, 2);
  EXPECT_EQ(Shampoo(*plain).param_groups().size(), 1);
}

TEST(ShampooOfAModel, FromAdamWTakesIt) {
  const TiedModel model;
  const auto optimizer = Shampoo::from_adamw(
      *model, AdamWOptions(0.1), [](ShampooOptions& options) { options.update_freq(7); });
  const auto expected = ShampooOptions::from_adamw(AdamWOptions(0.1)).update_freq(7);
  EXPECT_EQ(options_of<ShampooOptions>(optimizer, 0), expected);
  EXPECT_EQ(options_of<ShampooOptions>(optimizer, 1),
            ShampooOptions(expected).preconditioned(false));
}

TEST(ShampooOfAModel, ReportsItsNames) {
  TiedModel model;
  auto optimizer = Shampoo::from_adamw(*model);
  const auto planned = by_name(optimizer.report());
  EXPECT_EQ(planned.at("linear.weight").rule, "preconditioned");
  EXPECT_EQ(planned.at("linear.weight").detail, "1 block 5x6, exponent -0.5");
  EXPECT_EQ(planned.at("linear.bias").rule, "diagonal");
  EXPECT_EQ(planned.at("tokens.weight").rule, "adam");
  EXPECT_EQ(planned.at("tokens.weight").detail, "preconditioned is off");
  EXPECT_EQ(planned.at("tokens.weight").group, 1);
  EXPECT_EQ(planned.at("frozen.bias").rule, "none");
  EXPECT_EQ(planned.at("frozen.bias").state_bytes, 0);
  train(optimizer, {model->linear->weight, model->tokens->weight}, 0, 1);
  for (const auto& [name, parameter] : by_name(optimizer.report())) {
    EXPECT_EQ(parameter.state_bytes, planned.at(name).state_bytes) << name;
  }
  std::ostringstream table;
  table << optimizer.report();
  expect_contains(table.str(), "tokens.weight  20x6   adam            preconditioned is off");
  set_grad(model->linear->weight, torch::full({5, 6}, kNaN));
  optimizer.step();
  optimizer.step();
  expect_contains(message_of<c10::Error>([&] { optimizer.step(); }), "'linear.weight'");
}

TEST(ShampooRules, UnpreconditionedParametersStepAsWithAdamW) {
  const Tensors params = odd_parameters();
  const Tensors others = parameters_like(params);
  auto shampoo =
      Shampoo::from_adamw(params, AdamWOptions(0.01).weight_decay(0.1),
                          [](ShampooOptions& options) { options.preconditioned(false); });
  AdamW adamw(others, AdamWOptions(0.01).weight_decay(0.1));
  train(shampoo, params, 0, 20);
  train(adamw, others, 0, 20);
  for (size_t i = 0; i < params.size(); ++i) {
    expect_near(params[i].detach(), others[i].detach());
    EXPECT_EQ(state_tensors(shampoo, params[i]).size(), 5);  // step, two averages, their starts
  }
}

TEST(ShampooRules, TheLimitIsOneOfDimensions) {
  const Tensors params{parameter(torch::ones({9, 2})), parameter(torch::ones({8, 2}))};
  const auto lines =
      Shampoo(params, ShampooOptions().max_preconditioned_dim(8)).report().parameters;
  EXPECT_EQ(lines[0].rule, "diagonal");
  EXPECT_EQ(lines[0].detail, "dimension 9 above max_preconditioned_dim 8");
  EXPECT_EQ(lines[1].rule, "preconditioned");
  EXPECT_EQ(lines[1].detail, "1 block 8x2, exponent -1/4");
  EXPECT_THROW(Shampoo(params, ShampooOptions().max_preconditioned_dim(0)), c10::ValueError);
  const auto unlimited = Shampoo(params, ShampooOptions().max_preconditioned_dim(std::nullopt));
  EXPECT_EQ(unlimited.report().parameters[0].rule, "preconditioned");
}

TEST(ShampooRules, TargetOrdersMergeAsInDistributedShampoo) {
  const Tensors params{parameter(torch::ones({6, 4})), parameter(torch::ones({8, 3, 3, 3})),
                       parameter(torch::ones({2, 1, 3})), parameter(torch::ones({}))};
  const auto details = [&](std::optional<int64_t> target_order) {
    std::vector<std::string> result;
    const auto options =
        ShampooOptions().target_order(target_order).block_size(24).preconditioner_1d("full");
    for (const auto& line : Shampoo(params, options).report().parameters) {
      result.push_back(line.detail.substr(0, line.detail.find(',')));
    }
    return result;
  };
  using Blocks = std::vector<std::string>;
  EXPECT_EQ(details(1), (Blocks{"1 block 24", "1 block 24x9", "1 block 6", "1 block 1"}));
  EXPECT_EQ(details(2), (Blocks{"1 block 6x4", "1 block 24x9", "1 block 2x3", "1 block 1"}));
  EXPECT_EQ(details(0), (Blocks{"1 block 6x4", "1 block 8x3x3x3", "1 block 2x1x3", "order 0"}));
  EXPECT_THROW(Shampoo(params, ShampooOptions().target_order(-1)), c10::ValueError);
  EXPECT_THROW(Shampoo(params, ShampooOptions().target_order(1).merge_dims(false)),
               c10::ValueError);
}

TEST(ShampooRules, CannotChangeInMidRun) {
  for (const bool before : {true, false}) {
    const Tensors params{parameter(torch::ones({4, 4}))};
    Shampoo optimizer(params, ShampooOptions().grafting("adam").preconditioned(before));
    train(optimizer, params, 0, 2);
    const auto values = copies(params);
    auto& options = dynamic_cast<ShampooOptions&>(optimizer.param_groups()[0].options());
    options.preconditioned(!before);
    expect_contains(message_of<c10::ValueError>([&] { train(optimizer, params, 2, 3); }),
                    "does not fit after the change of preconditioned from");
    EXPECT_THROW(optimizer.update_preconditioners(), c10::ValueError);
    expect_equal(copies(params), values);
    options.preconditioned(before).grafting("rmsprop");  // no other rule
    train(optimizer, params, 2, 3);
  }
}

// An archive with the options of `saved` but one, and an entry that Shampoo does not have.
torch::serialize::InputArchive archive_of(const ShampooOptions& saved, const std::string& left_out,
                                          const std::string& added = "") {
  torch::serialize::OutputArchive written;
  optim::detail::for_each_option(saved, [&](const auto& option) {
    if (option.name != left_out) {
      written.write(option.name, c10::IValue(option.value));
    }
  });
  if (!added.empty()) {
    written.write(added, c10::IValue(1.0));
  }
  std::stringstream stream;
  written.save_to(stream);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  return archive;
}

TEST(ShampooRules, ArchivesFromBeforeAnOptionExisted) {
  const auto ours = ShampooOptions(0.5)
                        .betas({0.8, 0.9})
                        .momentum(0.5)
                        .nesterov(true)
                        .max_preconditioned_dim(5)
                        .grafting("sgd")
                        .root_dtype("bfloat16");
  optim::detail::for_each_option(ours, [&](const auto& kept) {
    SCOPED_TRACE(kept.name);
    auto archive = archive_of(ShampooOptions(0.25).block_size(7), kept.name);
    auto options = ours;
    options.serialize(archive);
    auto expected = ShampooOptions(0.25).block_size(7);
    optim::detail::for_each_option(expected, [&](const auto& option) {
      if constexpr (std::is_same_v<std::decay_t<decltype(option.value)>,
                                   std::decay_t<decltype(kept.value)>>) {
        if (option.name == std::string(kept.name)) {
          option.value = kept.value;
        }
      }
    });
    EXPECT_EQ(options, expected);
  });
  auto options = ours;
  auto later = archive_of(ours, "", "an_option_of_later");
  expect_contains(message_of<c10::ValueError>([&] { options.serialize(later); }),
                  "has the option 'an_option_of_later'");
}

}  // namespace
}  // namespace torchium::testing
