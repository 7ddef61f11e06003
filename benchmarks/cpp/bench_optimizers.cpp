// Steps of the C++ optimizers with fixed gradients, beside those of libtorch's own.
#include <torchium/torchium.h>

#include <torch/torch.h>

#include <benchmark/benchmark.h>
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
  // Shampoo's roots are due at powers of two besides update_freq; 32 steps put those behind.
  for (int step = 0; step < 32; ++step) optimizer.step();
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
BENCHMARK(libtorch_adagrad)->ArgName("workload")->Arg(0)->Arg(1)->Unit(benchmark::kMillisecond);
BENCHMARK(libtorch_adam)->ArgName("workload")->Arg(0)->Arg(1)->Unit(benchmark::kMillisecond);

}  // namespace
