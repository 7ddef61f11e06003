// Archives of the optimizers: a saved and loaded run continues bitwise identically, and an archive
// that does not fit loads nothing.
#include "optimizer_testing.h"
#include "torchium/optim/adagrad.h"
#include "torchium/optim/shampoo.h"

#include <cstdio>
#include <functional>
#include <memory>

namespace torchium::testing {
namespace {

using optim::Adagrad;
using optim::AdagradOptions;
using optim::SecondOrderOptimizer;
using optim::Shampoo;
using optim::ShampooOptions;

struct Case {
  std::string name;
  std::function<std::unique_ptr<SecondOrderOptimizer>(const Tensors&)> make;
  torch::Dtype dtype = torch::kFloat;
};

template <typename Optimizer, typename Options>
Case make_case(std::string name, Options options, torch::Dtype dtype = torch::kFloat) {
  return {std::move(name),
          [options](const Tensors& params) -> std::unique_ptr<SecondOrderOptimizer> {
            return std::make_unique<Optimizer>(params, options);
          },
          dtype};
}

std::vector<Case> cases() {
  const auto shampoo = ShampooOptions(0.1).update_freq(3).block_size(4);
  auto all = shampoo;
  all.betas({0.9, 0.99}).momentum(0.9).nesterov(true).grafting("adam").weight_decay(0.01);
  auto full = shampoo;
  full.preconditioner_1d("full").exponent(-0.3).grafting_beta2(0.9);
  auto rounded = shampoo;
  rounded.root_dtype("bfloat16");
  const auto adagrad = AdagradOptions(0.1).lr_decay(0.01);
  auto matrix = adagrad;
  matrix.full_matrix(true).block_size(8).update_freq(2);
  return {make_case<Shampoo>("shampoo", shampoo),
          make_case<Shampoo>("shampoo_all", all),
          make_case<Shampoo>("shampoo_bfloat16", all, torch::kBFloat16),
          make_case<Shampoo>("shampoo_double", all, torch::kDouble),
          make_case<Shampoo>("shampoo_full", full),
          make_case<Shampoo>("shampoo_16_bit_roots", rounded),
          make_case<Adagrad>("adagrad", adagrad),
          make_case<Adagrad>("adagrad_full", matrix)};
}

class Archives : public ::testing::TestWithParam<Case> {
 protected:
  std::unique_ptr<SecondOrderOptimizer> make(const Tensors& params) {
    return GetParam().make(params);
  }
  Tensors start() { return odd_parameters(GetParam().dtype); }
};

TEST_P(Archives, ContinueInAFreshOptimizer) {
  const auto params = start();
  const auto optimizer = make(params);
  train(*optimizer, params, 0, 5);
  const auto data = saved(*optimizer);
  const auto resumed_params = parameters_like(params);
  train(*optimizer, params, 5, 10);

  const auto resumed = make(resumed_params);
  load(*resumed, data);
  train(*resumed, resumed_params, 5, 10);
  expect_equal(copies(resumed_params), copies(params));
  expect_equal(all_state(*resumed), all_state(*optimizer));
}

TEST_P(Archives, ContinueInTheOptimizerThatRanOn) {
  const auto params = start();
  const auto optimizer = make(params);
  train(*optimizer, params, 0, 5);
  const auto data = saved(*optimizer);
  const auto values = copies(params);
  train(*optimizer, params, 5, 10);
  const auto expected = copies(params);

  load(*optimizer, data);
  for (size_t i = 0; i < params.size(); ++i) {
    params[i].detach().copy_(values[i]);
  }
  train(*optimizer, params, 5, 10);
  expect_equal(copies(params), expected);
}

TEST_P(Archives, HoldParametersThatStartedLate) {
  const auto params = start();
  const auto optimizer = make(params);
  train(*optimizer, Tensors(params.begin() + 2, params.end()), 0, 3);
  const auto data = saved(*optimizer);
  const auto resumed_params = parameters_like(params);
  const auto resumed = make(resumed_params);
  load(*resumed, data);
  EXPECT_EQ(resumed->state().size(), params.size() - 2);
  train(*optimizer, params, 3, 6);
  train(*resumed, resumed_params, 3, 6);
  expect_equal(copies(resumed_params), copies(params));
}

TEST_P(Archives, AreSnapshots) {
  const auto params = start();
  const auto optimizer = make(params);
  train(*optimizer, params, 0, 2);
  torch::serialize::OutputArchive archive;
  optimizer->save(archive);
  const auto state = all_state(*optimizer);
  train(*optimizer, params, 2, 4);  // does not reach the archive
  std::stringstream stream;
  archive.save_to(stream);
  torch::serialize::InputArchive input;
  input.load_from(stream);
  for (int round = 0; round < 2; ++round) {
    optimizer->load(input);
    expect_equal(all_state(*optimizer), state);
    train(*optimizer, params, 4, 6);  // nor the archive that was read
  }
}

// A saved view must not include its whole buffer.
TEST_P(Archives, HoldNoBlockStorage) {
  Tensors params;
  for (int i = 0; i < 32; ++i) {
    params.push_back(parameter(torch::randn({16, 16}).to(GetParam().dtype)));
  }
  const auto optimizer = make(params);
  train(*optimizer, params, 0, 1);
  size_t bytes = 0;
  for (const auto& tensor : all_state(*optimizer)) {
    bytes += tensor.nbytes();
  }
  EXPECT_LT(saved(*optimizer).size(), 2 * bytes + 1024 * 1024);
}

TEST_P(Archives, PassThroughTorchSaveAndLoad) {
  const auto params = start();
  const auto optimizer = make(params);
  train(*optimizer, params, 0, 2);
  const std::string path = ::testing::TempDir() + "torchium_" + GetParam().name + ".pt";
  torch::save(*optimizer, path);
  const auto resumed = make(parameters_like(params));
  torch::load(*resumed, path);
  std::remove(path.c_str());
  expect_equal(all_state(*resumed), all_state(*optimizer));
}

TEST_P(Archives, ThatDoNotFitLoadNothing) {
  const auto params = start();
  const auto optimizer = make(params);
  train(*optimizer, params, 0, 2);
  const auto data = saved(*optimizer);
  const auto refuses = [&](const Tensors& other_params, const std::string& part) {
    const auto other = make(other_params);
    train(*other, other_params, 0, 1);
    const auto before = all_state(*other);
    expect_contains(message_of<c10::ValueError>([&] { load(*other, data); }), part);
    expect_equal(all_state(*other), before);
    EXPECT_EQ(other->state().size(), other_params.size());
  };
  auto fewer = parameters_like(params);
  fewer.pop_back();
  refuses(fewer, "group 0 of the archive has 8 parameters, but that of the optimizer has 7");
  auto other_shape = parameters_like(params);
  other_shape.back() = parameter(torch::zeros({8, 6}).to(GetParam().dtype));
  refuses(other_shape, "parameter 7 of group 0 (shape [8, 6])");
}

INSTANTIATE_TEST_SUITE_P(All, Archives, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST(ArchiveOptions, AreRestored) {
  auto param = parameter(torch::zeros({2, 2}));
  const auto options = ShampooOptions(0.5)
                           .eps(1e-3)
                           .update_freq(7)
                           .weight_decay(0.1)
                           .betas({0.8, 0.9})
                           .momentum(0.7)
                           .nesterov(true)
                           .decoupled_weight_decay(true)
                           .relative_eps(1e-6)
                           .block_size(32)
                           .merge_dims(false)
                           .exponent(-0.4)
                           .preconditioner_1d("full")
                           .grafting("rmsprop")
                           .grafting_eps(1e-7)
                           .grafting_beta2(0.95)
                           .start_preconditioning_step(3)
                           .root_method("eigh")
                           .root_dtype("bfloat16")
                           .matmul_precision("high")
                           .max_root_failures(5)
                           .maximize(true)
                           .capturable(true)
                           .graphs("never");
  Shampoo source({param}, options);
  Shampoo target({parameter(torch::zeros({2, 2}))});
  load(target, saved(source));
  const auto& loaded = static_cast<ShampooOptions&>(target.param_groups()[0].options());
  EXPECT_TRUE(loaded == options);
  EXPECT_FALSE(loaded == ShampooOptions(0.5));

  const auto as_given = ShampooOptions().target_order(0);
  load(target, saved(Shampoo({param}, as_given)));
  EXPECT_TRUE(static_cast<ShampooOptions&>(target.param_groups()[0].options()) == as_given);

  const auto adagrad_options = AdagradOptions(0.5)
                                   .lr_decay(0.1)
                                   .weight_decay(0.2)
                                   .initial_accumulator_value(0.3)
                                   .eps(0.4)
                                   .full_matrix(true)
                                   .block_size(5)
                                   .update_freq(6)
                                   .maximize(true);
  Adagrad adagrad({param}, adagrad_options);
  Adagrad adagrad_target({param});
  load(adagrad_target, saved(adagrad));
  EXPECT_TRUE(static_cast<AdagradOptions&>(adagrad_target.param_groups()[0].options()) ==
              adagrad_options);
}

TEST(ArchivesOfOthers, AreRefused) {
  auto param = parameter(torch::zeros({2, 2}));
  const auto refused = [&](torch::optim::Optimizer& source) {
    train(source, {param}, 0, 1);
    Shampoo target({parameter(torch::zeros({2, 2}))});
    return message_of<c10::ValueError>([&] { load(target, saved(source)); });
  };
  Adagrad adagrad({param});
  expect_contains(refused(adagrad), "was not written by this kind of optimizer");
  torch::optim::Adam adam({param});
  expect_contains(refused(adam), "was not written by this kind of optimizer");
  Shampoo two_groups({torch::optim::OptimizerParamGroup({param}),
                      torch::optim::OptimizerParamGroup({parameter(torch::zeros({1}))})});
  expect_contains(refused(two_groups), "2 parameter groups, but the optimizer has 1");
}

TEST(ArchivesOfOtherDtypes, AreConverted) {
  const auto params = odd_parameters(torch::kDouble);
  Shampoo source(params, ShampooOptions(0.1));
  train(source, params, 0, 2);
  const auto float_params = odd_parameters(torch::kFloat);
  Shampoo target(float_params, ShampooOptions(0.1));
  load(target, saved(source));
  for (size_t p = 0; p < params.size(); ++p) {
    const auto expected = state_tensors(source, params[p]);
    const auto actual = state_tensors(target, float_params[p]);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      const auto& [key, tensor] = actual[i];
      EXPECT_EQ(tensor.scalar_type(), float32_state_dtype(key)) << key;
      expect_equal({tensor}, {expected[i].second.to(tensor.scalar_type())});
    }
  }
}

}  // namespace
}  // namespace torchium::testing
