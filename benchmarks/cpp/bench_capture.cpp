// The cost of capturing the layers of a model: per operator, and in a forward and backward pass.
// K-FAC captures at its first step and every TCov steps, natural gradient at each.
#include <torchium/torchium.h>

#include <torch/torch.h>

#include <benchmark/benchmark.h>
#include <memory>

namespace {

namespace nn = torch::nn;

std::unique_ptr<torchium::optim::NaturalGradient> watch(const nn::Module& model, bool watched) {
  return watched ? std::make_unique<torchium::optim::NaturalGradient>(model) : nullptr;
}

// An operator without a layer: the callback compares its name and returns.
void other_operator(benchmark::State& state) {
  const nn::Linear model(4, 4);
  const auto optimizer = watch(*model, state.range(0) != 0);
  const auto x = torch::ones({4});
  for (auto _ : state) benchmark::DoNotOptimize(x.neg());
}

// A small layer, forward only: the layer call is recorded and its output hooked.
void linear_layer(benchmark::State& state) {
  nn::Linear model(4, 4);
  const auto optimizer = watch(*model, state.range(0) != 0);
  const auto x = torch::ones({4, 4});
  for (auto _ : state) benchmark::DoNotOptimize(model(x));
}

void forward_and_backward(benchmark::State& state) {
  torch::manual_seed(0);
  nn::Sequential model(nn::Linear(784, 512), nn::ReLU(), nn::Linear(512, 512), nn::ReLU(),
                       nn::Linear(512, 10));
  const auto optimizer = watch(*model, state.range(0) != 0);
  const auto inputs = torch::randn({64, 784});
  const auto targets = torch::randint(10, {64}, torch::kLong);
  for (auto _ : state) {
    model->zero_grad();
    nn::functional::cross_entropy(model->forward(inputs), targets).backward();
    if (optimizer != nullptr) optimizer->zero_grad();  // discards captured tensors
  }
  state.SetLabel("MLP 784-512-512-10, batch 64");
}

BENCHMARK(other_operator)->ArgName("watched")->Arg(0)->Arg(1);
BENCHMARK(linear_layer)->ArgName("watched")->Arg(0)->Arg(1);
BENCHMARK(forward_and_backward)->ArgName("watched")->Arg(0)->Arg(1)->Unit(benchmark::kMicrosecond);

}  // namespace
