// Models and batches for the tests of capturing optimizers.
#pragma once

#include "optimizer_testing.h"
#include "torchium/optim/curvature_options.h"

#include <utility>

namespace torchium::testing {

namespace nn = torch::nn;

inline nn::Sequential make_mlp(torch::Dtype dtype = torch::kDouble) {
  torch::manual_seed(1);
  nn::Sequential model(nn::Linear(5, 7), nn::Tanh(), nn::Linear(7, 4), nn::Tanh(),
                       nn::Linear(4, 3));
  model->to(dtype);
  return model;
}

inline nn::Sequential make_convnet(torch::Dtype dtype = torch::kDouble) {
  torch::manual_seed(2);
  nn::Sequential model(nn::Conv2d(nn::Conv2dOptions(2, 4, 3).groups(2)), nn::GroupNorm(2, 4),
                       nn::ReLU(nn::ReLUOptions(true)),
                       nn::Conv2d(nn::Conv2dOptions(4, 3, 2).stride(2).bias(false)), nn::Tanh(),
                       nn::Flatten(), nn::Linear(12, 3));
  model->to(dtype);
  return model;
}

// Copies the parameters of one model to another.
inline void copy_parameters(const nn::Module& from, const nn::Module& to) {
  const torch::NoGradGuard no_grad;
  const auto source = from.parameters();
  auto target = to.parameters();
  for (size_t i = 0; i < source.size(); ++i) {
    target[i].copy_(source[i]);
  }
}

struct Batch {
  torch::Tensor inputs;
  torch::Tensor targets;
};

// A batch that depends only on the step.
inline Batch make_batch(int step, torch::IntArrayRef sample_shape, int64_t size = 6,
                        torch::Dtype dtype = torch::kDouble) {
  auto generator = torch::make_generator<torch::CPUGeneratorImpl>(100 + step);
  std::vector<int64_t> shape{size};
  shape.insert(shape.end(), sample_shape.begin(), sample_shape.end());
  return {torch::randn(shape, generator, torch::kDouble).to(dtype),
          torch::randint(3, {size}, generator, torch::kLong)};
}

inline torch::Tensor cross_entropy(const torch::Tensor& output, const torch::Tensor& targets) {
  return nn::functional::cross_entropy(output, targets);
}

// One step on the mean loss of a batch.
template <typename Optimizer>
void train_on(Optimizer& optimizer, nn::Sequential& model, const Batch& batch) {
  optimizer.zero_grad();
  cross_entropy(model->forward(batch.inputs), batch.targets).backward();
  optimizer.step();
}

// An archive sets the options of the optimizer that loads it.
template <typename Optimizer, typename Options>
void expect_restored_options(const Options& options) {
  const nn::Linear model(2, 2);
  Optimizer source(*model, options);
  Optimizer target(*model);
  load(target, saved(source));
  const auto& loaded = static_cast<Options&>(target.param_groups()[0].options());
  EXPECT_TRUE(loaded == options);
  EXPECT_FALSE(loaded == Options());
}

inline void expect_foreign_archive_refused(torch::optim::Optimizer& optimizer) {
  torch::optim::SGD sgd(optimizer.param_groups()[0].params(), torch::optim::SGDOptions(0.1));
  expect_contains(message_of<c10::ValueError>([&] { load(optimizer, saved(sgd)); }),
                  "was not written by this kind of optimizer");
}

// Loads an archive into an optimizer that it does not fit, which must not change.
inline std::string refusal_to_load(torch::optim::Optimizer& optimizer, const std::string& data) {
  const auto before = all_state(optimizer);
  const auto message = message_of<c10::ValueError>([&] { load(optimizer, data); });
  expect_equal(all_state(optimizer), before);
  return message;
}

inline const std::vector<int64_t> kMlpSample{5};
inline const std::vector<int64_t> kImageSample{2, 6, 6};

// Steps first..last-1 with update_curvature(), each on a new batch.
template <typename Optimizer>
void train_with_curvature(Optimizer& optimizer, nn::Sequential& model, int first, int last) {
  for (int step = first; step < last; ++step) {
    const auto batch = make_batch(step, kMlpSample);
    optimizer.zero_grad();
    const auto outputs = model->forward(batch.inputs);
    optimizer.update_curvature(
        outputs, "cross_entropy",
        optim::CurvatureOptions().generator(torch::make_generator<torch::CPUGeneratorImpl>(step)));
    cross_entropy(outputs, batch.targets).backward();
    optimizer.step();
  }
}

// One step of the optimizer that `make` returns, with update_curvature(), lands on the least
// squares solution.
template <typename Make>
void expect_linear_regression_in_one_step(const Make& make, double tolerance) {
  const auto x = make_batch(0, kMlpSample, 20).inputs;
  const auto y = make_batch(1, {3}, 20).inputs;
  nn::Linear model(5, 3);
  model->to(torch::kDouble);
  auto optimizer = make(*model);
  const auto outputs = model(x);
  optimizer.update_curvature(outputs, "mse");
  nn::functional::mse_loss(outputs, y).backward();
  optimizer.step();
  const auto solution = std::get<0>(torch::linalg_lstsq(
      torch::cat({x, torch::ones({20, 1}, x.options())}, 1), y, std::nullopt, std::nullopt));
  const torch::NoGradGuard no_grad;
  expect_near(torch::cat({model->weight.t(), model->bias.unsqueeze(0)}), solution, tolerance);
}

// 60 steps on one batch from make_mlp() end below `ratio` of the loss of SGD with momentum.
template <typename Optimizer>
void expect_faster_than_momentum(Optimizer& optimizer, nn::Sequential& model, double ratio) {
  const auto data = make_batch(0, kMlpSample, 64);
  const auto train_loss = [&](auto& trainer, nn::Sequential& trained) {
    for (int step = 0; step < 60; ++step) {
      train_on(trainer, trained, data);
    }
    return cross_entropy(trained->forward(data.inputs), data.targets).template item<double>();
  };
  auto sgd_model = make_mlp();
  torch::optim::SGD sgd(sgd_model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  EXPECT_LT(train_loss(optimizer, model), ratio * train_loss(sgd, sgd_model));
}

// Two heads on one trunk.
struct TwoHeads : public nn::Module {
  TwoHeads() {
    torch::manual_seed(3);
    trunk = register_module("trunk", nn::Linear(4, 5));
    first = register_module("first", nn::Linear(5, 3));
    second = register_module("second", nn::Linear(5, 2));
    to(torch::kDouble);
  }
  std::pair<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x) {
    const auto h = trunk(x).tanh();
    return {first(h), second(h)};
  }
  nn::Linear trunk{nullptr}, first{nullptr}, second{nullptr};
};

// Collects the warnings of its scope.
class Warnings : public c10::WarningHandler {
 public:
  Warnings() : guard_(this) {}
  void process(const c10::Warning& warning) override { text += warning.msg(); }

  std::string text;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_;
};

}  // namespace torchium::testing
