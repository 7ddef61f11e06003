// Models of several kinds, and helpers for the tests of natural gradient and per-sample gradients.
#pragma once

#include "model_testing.h"
#include "torchium/optim/natural_gradient.h"

#include <functional>
#include <memory>
#include <string>

namespace torchium::testing {

using optim::NaturalGradient;
using optim::NaturalGradientOptions;

// An embedding, a norm, and the embedding again as the output layer.
struct Tied : public nn::Module {
  explicit Tied(torch::Dtype dtype = torch::kDouble) {
    torch::manual_seed(3);
    embedding = register_module("embedding", nn::Embedding(6, 4));
    hidden = register_module("hidden", nn::Linear(4, 4));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({4})));
    to(dtype);
  }
  torch::Tensor forward(const torch::Tensor& indices) {
    auto x = torch::tanh(hidden(embedding(indices)));
    x = torch::tanh(norm(hidden(x)));
    return torch::linear(x, embedding->weight).transpose(1, 2);  // [batch, 6, positions]
  }
  nn::Embedding embedding{nullptr};
  nn::Linear hidden{nullptr};
  nn::LayerNorm norm{nullptr};
};

// A model, its input at a step, and the mean loss.
struct Problem {
  std::string name;
  std::function<std::shared_ptr<nn::Module>(torch::Dtype)> make;
  std::function<torch::Tensor(nn::Module&, const torch::Tensor&)> forward;
  std::function<Batch(int, torch::Dtype)> batch;
};

inline torch::Tensor run_sequential(nn::Module& model, const torch::Tensor& x) {
  return static_cast<nn::SequentialImpl&>(model).forward(x);
}

inline std::vector<Problem> problems() {
  return {{"mlp", [](auto dtype) { return make_mlp(dtype).ptr(); }, &run_sequential,
           [](int step, auto dtype) { return make_batch(step, kMlpSample, 6, dtype); }},
          {"convnet", [](auto dtype) { return make_convnet(dtype).ptr(); }, &run_sequential,
           [](int step, auto dtype) { return make_batch(step, kImageSample, 6, dtype); }},
          {"tied", [](auto dtype) { return std::make_shared<Tied>(dtype); },
           [](nn::Module& model, const torch::Tensor& x) {
             return static_cast<Tied&>(model).forward(x);
           },
           [](int step, auto) {
             auto generator = torch::make_generator<torch::CPUGeneratorImpl>(step);
             return Batch{torch::randint(6, {5, 3}, generator, torch::kLong),
                          torch::randint(6, {5, 3}, generator, torch::kLong)};
           }}};
}

inline torch::Tensor flatten(const Tensors& tensors) {
  Tensors flat;
  for (const auto& tensor : tensors) {
    flat.push_back(tensor.detach().reshape({-1}));
  }
  return torch::cat(flat);
}

// Per-sample gradients, one backward pass each: [n, P].
inline torch::Tensor dense_jacobian(const Problem& problem, nn::Module& model, const Batch& batch) {
  Tensors rows;
  for (int64_t i = 0; i < batch.targets.size(0); ++i) {
    const auto output = problem.forward(model, batch.inputs.narrow(0, i, 1));
    const auto loss = cross_entropy(output, batch.targets.narrow(0, i, 1));
    rows.push_back(flatten(torch::autograd::grad({loss}, model.parameters())));
  }
  return torch::stack(rows);
}

inline void train_step(NaturalGradient& optimizer, const Problem& problem, nn::Module& model,
                       const Batch& batch) {
  optimizer.zero_grad();
  cross_entropy(problem.forward(model, batch.inputs), batch.targets).backward();
  optimizer.step();
}

inline void train(NaturalGradient& optimizer, const Problem& problem, nn::Module& model, int first,
                  int last) {
  const auto dtype = model.parameters()[0].scalar_type();
  for (int step = first; step < last; ++step) {
    train_step(optimizer, problem, model, problem.batch(step, dtype));
  }
}

inline void expect_close(const nn::Module& actual, const nn::Module& expected, double tolerance) {
  const auto difference = (flatten(actual.parameters()) - flatten(expected.parameters())).norm();
  EXPECT_LT(difference.item<double>(),
            tolerance * flatten(expected.parameters()).norm().item<double>());
}

template <typename Action>
std::string refusal(Action&& action) {
  return message_of<c10::ValueError>(std::forward<Action>(action));
}

class Problems : public ::testing::TestWithParam<Problem> {
 protected:
  std::shared_ptr<nn::Module> make(torch::Dtype dtype = torch::kDouble) {
    return GetParam().make(dtype);
  }
};

}  // namespace torchium::testing
