// Steps of the C++ optimizers with fixed gradients, compared with libtorch's.
#include <torchium/torchium.h>

#include <torch/torch.h>

#include <benchmark/benchmark.h>
#include <memory>
#include <vector>

namespace {

using Shapes = std::vector<std::vector<int64_t>>;

const Shapes& shapes(int64_t workload) {
  static const Shapes mlp = {{512, 784}, {512}, {512, 512}, {512}, {10, 512}, {10}};
  static const Shapes many_small(1000, {8, 8});
  return workload == 0 ? mlp : many_small;
}

std::vector<at::Tensor> parameters_with_gradients(const Shapes& shapes) {
  torch::manual_seed(0);
  std::vector<at::Tensor> parameters;
  for (const auto& shape : shapes) {
    auto parameter = torch::randn(shape).requires_grad_();
    parameter.mutable_grad() = torch::randn(shape);
    parameters.push_back(parameter);
  }
  return parameters;
}

template <typename Optimizer>
void time_steps(benchmark::State& state, Optimizer& optimizer) {
  // In addition to update_freq, Shampoo's roots are due four times per power of two. After these
  // steps the next 127 compute none.
  for (int step = 0; step < 512; ++step) optimizer.step();
  for (auto _ : state) optimizer.step();
  state.SetLabel(state.range(0) == 0 ? "MLP 784-512-512-10" : "1,000 matrices 8 x 8");
}

void shampoo(benchmark::State& state) {
  using namespace torchium::optim;
  const bool roots_due = state.range(1) != 0;
  Shampoo optimizer(parameters_with_gradients(shapes(state.range(0))),
                    ShampooOptions(0.03).update_freq(roots_due ? 1 : 1'000'000'000));
  time_steps(state, optimizer);
}

void adagrad(benchmark::State& state) {
  using namespace torchium::optim;
  Adagrad optimizer(parameters_with_gradients(shapes(state.range(0))), AdagradOptions(0.01));
  time_steps(state, optimizer);
}

// A forward and backward pass of the MLP, and a step. `optimizer`: 0 K-FAC without factors due, 1
// with factors and inverses due, 2 natural gradient, 3 SGD with momentum.
void training_step(benchmark::State& state) {
  using namespace torchium::optim;
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(784, 512), torch::nn::ReLU(),
                              torch::nn::Linear(512, 512), torch::nn::ReLU(),
                              torch::nn::Linear(512, 10));
  const int64_t rarely = 1'000'000'000;
  const std::unique_ptr<torch::optim::Optimizer> optimizer =
      [&]() -> std::unique_ptr<torch::optim::Optimizer> {
    switch (state.range(0)) {
      case 0:
        return std::make_unique<KFAC>(*model, KFACOptions(1e-4).TCov(rarely).TInv(rarely));
      case 1:
        return std::make_unique<KFAC>(*model, KFACOptions(1e-4).TCov(1).TInv(1));
      case 2:
        return std::make_unique<NaturalGradient>(*model, NaturalGradientOptions(1e-4));
      default:
        return std::make_unique<torch::optim::SGD>(model->parameters(),
                                                   torch::optim::SGDOptions(1e-4).momentum(0.9));
    }
  }();
  const auto inputs = torch::randn({64, 784});
  const auto targets = torch::randint(10, {64}, torch::kLong);
  const auto step = [&] {
    model->zero_grad();
    torch::nn::functional::cross_entropy(model->forward(inputs), targets).backward();
    optimizer->step();
  };
  step();  // factors and inverses of the first step
  for (auto _ : state) step();
  state.SetLabel("MLP 784-512-512-10, batch 64");
}

void libtorch_adagrad(benchmark::State& state) {
  torch::optim::Adagrad optimizer(parameters_with_gradients(shapes(state.range(0))),
                                  torch::optim::AdagradOptions(0.01));
  time_steps(state, optimizer);
}

void libtorch_adam(benchmark::State& state) {
  torch::optim::Adam optimizer(parameters_with_gradients(shapes(state.range(0))),
                               torch::optim::AdamOptions(0.001));
  time_steps(state, optimizer);
}

BENCHMARK(shampoo)
    ->ArgNames({"workload", "roots_due"})
    ->ArgsProduct({{0, 1}, {0, 1}})
    ->Unit(benchmark::kMillisecond);
BENCHMARK(adagrad)->ArgName("workload")->Arg(0)->Arg(1)->Unit(benchmark::kMillisecond);
BENCHMARK(training_step)->ArgName("optimizer")->DenseRange(0, 3)->Unit(benchmark::kMillisecond);
BENCHMARK(libtorch_adagrad)->ArgName("workload")->Arg(0)->Arg(1)->Unit(benchmark::kMillisecond);
BENCHMARK(libtorch_adam)->ArgName("workload")->Arg(0)->Arg(1)->Unit(benchmark::kMillisecond);

}  // namespace
