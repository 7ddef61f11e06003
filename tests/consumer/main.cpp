// Fits a linear map with each optimizer; exits with 1 unless the loss falls to a tenth.
#include <torchium/torchium.h>

#include <torch/torch.h>

#include <iostream>
#include <type_traits>

template <typename Optimizer, typename Options>
bool fits(const char* name, const Options& options) {
  torch::manual_seed(0);
  const auto inputs = torch::randn({64, 8});
  const auto targets = inputs.matmul(torch::randn({8, 3}));
  torch::nn::Linear model(8, 3);
  auto optimizer = [&] {
    if constexpr (std::is_constructible_v<Optimizer, const torch::nn::Module&, Options>) {
      return Optimizer(*model, options);
    } else {
      return Optimizer(model->parameters(), options);
    }
  }();

  double first = 0, last = 0;
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    auto loss = torch::mse_loss(model(inputs), targets);
    loss.backward();
    optimizer.step();
    last = loss.template item<double>();
    if (step == 0) first = last;
  }
  std::cout << name << ": " << first << " -> " << last << '\n';
  return last < 0.1 * first;
}

int main() {
  using namespace torchium::optim;
  std::cout << torchium::show_config();
  const bool shampoo = fits<Shampoo>("Shampoo", ShampooOptions(0.3).update_freq(2));
  const bool adagrad = fits<Adagrad>("Adagrad", AdagradOptions(0.3));
  const bool kfac = fits<KFAC>("KFAC", KFACOptions(0.3).TCov(1).TInv(1).kl_clip(std::nullopt));
  const bool natural =
      fits<NaturalGradient>("NaturalGradient", NaturalGradientOptions(1.0).damping(1.0));
  return shampoo && adagrad && kfac && natural ? 0 : 1;
}
