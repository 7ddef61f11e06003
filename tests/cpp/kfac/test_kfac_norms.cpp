// Unit-wise blocks of norms. test_kfac_norms.py compares them with the float64 reference.
#include "kfac_testing.h"

namespace torchium::testing {
namespace {

// A batch norm in training mode on [N, 4, 3], with what it normalises and its output gradient kept.
struct Normalised : public nn::Module {
  Normalised() {
    torch::manual_seed(8);
    norm = register_module("norm", nn::BatchNorm1d(4));
    head = register_module("head", nn::Linear(4, 3));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    input = x.detach();
    output = norm(x);
    output.retain_grad();
    return head(output.tanh().mean(2));
  }
  nn::BatchNorm1d norm{nullptr};
  nn::Linear head{nullptr};
  torch::Tensor input, output;
};

class KfacNorms : public ::testing::TestWithParam<std::tuple<bool, std::string>> {};

TEST_P(KfacNorms, EqualBlocksByHand) {
  const bool is_training = std::get<0>(GetParam());
  const std::string sharing = std::get<1>(GetParam());
  auto model = std::make_shared<Normalised>();
  model->forward(make_batch(1, {4, 3}).inputs);  // running statistics
  model->train(is_training);
  KFAC optimizer(
      *model,
      KFACOptions(1.0).momentum(0).kl_clip(std::nullopt).damping(0.02).weight_sharing(sharing));
  const auto batch = make_batch(2, {4, 3});
  const auto before = torch::stack({model->norm->weight, model->norm->bias}, 1).detach().clone();
  optimizer.zero_grad();
  cross_entropy(model->forward(batch.inputs), batch.targets).backward();
  const auto V =
      torch::stack({model->norm->weight.grad(), model->norm->bias.grad()}, 1).unsqueeze(2);
  const auto x = model->input;
  const auto mean = is_training ? x.mean(torch::IntArrayRef({0, 2})) : model->norm->running_mean;
  const auto var = is_training ? x.var(torch::IntArrayRef({0, 2}), /*unbiased=*/false)
                               : model->norm->running_var;
  const auto column = [](const torch::Tensor& t) { return t.view({1, 4, 1}); };
  const auto normalised = (x - column(mean)) / (column(var) + 1e-5).sqrt();
  const auto N = x.size(0);
  const auto g = model->output.grad() * N;
  torch::Tensor j = torch::stack({normalised * g, g}, -1);  // [N, C, T, 2]
  j = sharing == "reduce" ? j.sum(2) : j.transpose(1, 2).flatten(0, 1);
  const auto F = torch::einsum("nci,ncj->cij", {j, j}) / N;
  optimizer.step();
  expect_near(kfac_state(optimizer, model->norm->weight).fisher_blocks(), F, 1e-10);
  const auto expected = torch::linalg_solve(F + 0.02 * torch::eye(2, F.options()), V).squeeze(2);
  const auto after = torch::stack({model->norm->weight, model->norm->bias}, 1).detach();
  expect_near(before - after, expected, 1e-10);
}

INSTANTIATE_TEST_SUITE_P(ModesAndSharings, KfacNorms,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::Values("expand", "reduce")));

TEST(KfacNorms, ContinueFromAnArchive) {
  auto model = std::make_shared<Normalised>(), resumed = std::make_shared<Normalised>();
  const auto options = KFACOptions(0.1).TCov(2);
  KFAC first(*model, options), second(*resumed, options);
  const auto train = [](KFAC& optimizer, Normalised& of, int begin, int end) {
    for (int step = begin; step < end; ++step) {
      const auto batch = make_batch(step, {4, 3});
      optimizer.zero_grad();
      cross_entropy(of.forward(batch.inputs), batch.targets).backward();
      optimizer.step();
    }
  };
  train(first, *model, 0, 3);
  copy_parameters(*model, *resumed);
  load(second, saved(first));
  train(first, *model, 3, 6);
  train(second, *resumed, 3, 6);
  expect_equal(copies(resumed->parameters()), copies(model->parameters()));
  EXPECT_EQ(second.report().preconditioned.size(), 4);
}

TEST(KfacNorms, OfOneWeightWithSeveralBiasesFallBack) {
  struct Shared : public nn::Module {
    Shared() {
      weight = register_parameter("weight", torch::ones({4}, torch::kDouble));
      first = register_parameter("first", torch::zeros({4}, torch::kDouble));
      second = register_parameter("second", torch::zeros({4}, torch::kDouble));
    }
    torch::Tensor weight, first, second;
  };
  auto model = std::make_shared<Shared>();
  KFAC optimizer(*model);
  const auto x = make_batch(0, {4}).inputs;
  const auto y = torch::layer_norm(x, {4}, model->weight, model->first).sin();
  torch::layer_norm(y, {4}, model->weight, model->second).square().sum().backward();
  const Warnings warnings;
  optimizer.step();
  expect_contains(warnings.text, "KFAC preconditions 0 of 3 parameters");
  expect_contains(warnings.text, "used by norms with different biases: weight");
}

}  // namespace
}  // namespace torchium::testing
