// A physics-informed network for Poisson's equation, by natural gradient and then by Adam:
//   poisson_pinn [error to reach, 1e-6] [hidden width, 24] [points per side, 30] [Adam's time, 1]
// Errors are relative. Adam's time is in units of that of natural gradient.
//
// -Laplace(u) = f on the unit square with u = 0 on its boundary, and f such that
// u = sin(pi x) sin(pi y). The network carries u, its gradient and its Laplacian through the layers
// (Li et al. 2023, arXiv 2307.08214), as four positions of a sample, so that a layer's one call
// yields the Jacobian of the residuals.
#include <torchium/torchium.h>

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iostream>
#include <string>
#include <vector>

namespace {

using torch::Tensor;
using torch::indexing::Slice;

constexpr int kDimensions = 2;
constexpr int kPositions = kDimensions + 2;  // u, its derivatives and its Laplacian
constexpr double kPi = 3.14159265358979323846;
constexpr double kBoundaryWeight = 100.0;
constexpr double kDamping = 1e-3;  // in units of the loss
constexpr double kLeastDamping = 1e-10;
constexpr double kAdamRate = 1e-2;

// A multilayer perceptron with tanh. Biases are the weights of an input that is 1 for u, and 0 for
// its derivatives.
struct Network : torch::nn::Module {
  explicit Network(int64_t width) {
    int64_t inputs = kDimensions;
    for (const int64_t outputs : {width, width, int64_t{1}}) {
      const auto options = torch::nn::LinearOptions(inputs + 1, outputs).bias(false);
      layers.push_back(
          register_module("layer" + std::to_string(layers.size()), torch::nn::Linear(options)));
      inputs = outputs;
    }
    to(torch::kFloat64);
  }

  // points: [n, 2]. Returns [n, 4], the positions.
  Tensor forward(const Tensor& points) {
    const int64_t n = points.size(0);
    const Tensor derivatives = torch::eye(kDimensions, points.options());
    Tensor x = torch::cat({points.unsqueeze(1), derivatives.expand({n, -1, -1}),
                           torch::zeros({n, 1, kDimensions}, points.options())},
                          1);
    Tensor one = torch::zeros({n, kPositions, 1}, points.options());
    one.index_put_({Slice(), 0}, 1.0);
    for (size_t i = 0; i < layers.size(); ++i) {
      if (i > 0) x = activated(x);
      x = layers[i]->forward(torch::cat({x, one}, 2));
    }
    return x.squeeze(2);
  }

  std::vector<torch::nn::Linear> layers;

 private:
  // tanh and its derivatives, by the chain rule.
  static Tensor activated(const Tensor& x) {
    const Tensor u = x.index({Slice(), Slice(0, 1)}).tanh();
    const Tensor slope = 1 - u.square();
    const Tensor gradient = x.index({Slice(), Slice(1, 1 + kDimensions)});
    const Tensor laplacian = x.index({Slice(), Slice(1 + kDimensions)});
    const Tensor squares = gradient.square().sum(1, /*keepdim=*/true);
    return torch::cat({u, slope * gradient, slope * (laplacian - 2 * u * squares)}, 1);
  }
};

Tensor exact(const Tensor& points) { return torch::sin(kPi * points).prod(-1); }

Tensor grid(const Tensor& ticks) { return torch::cartesian_prod({ticks, ticks}); }

// Laplace(u) + f inside and u on the boundary, weighted so that the mean of their squares is that
// inside plus kBoundaryWeight times that on the boundary.
struct Residuals {
  explicit Residuals(int64_t per_side) {
    const Tensor ticks = (torch::arange(per_side, torch::kFloat64) + 0.5) / per_side;
    const Tensor zeros = torch::zeros_like(ticks), ones = torch::ones_like(ticks);
    const Tensor inside = grid(ticks);
    points = torch::cat({inside, torch::stack({ticks, zeros}, 1), torch::stack({ticks, ones}, 1),
                         torch::stack({zeros, ticks}, 1), torch::stack({ones, ticks}, 1)});
    const int64_t count = points.size(0), inner = inside.size(0);
    is_inside = torch::arange(count) < inner;
    scale = torch::where(is_inside, std::sqrt(double(count) / inner),
                         std::sqrt(kBoundaryWeight * count / (count - inner)));
  }

  // [n]
  Tensor operator()(Network& network) const {
    const Tensor u = network.forward(points);
    const Tensor equation = u.select(1, kPositions - 1) + 2 * kPi * kPi * exact(points);
    return scale * torch::where(is_inside, equation, u.select(1, 0));
  }

  Tensor points, is_inside, scale;
};

// In L2, on points that training does not see.
double relative_error(Network& network) {
  const torch::NoGradGuard no_grad;
  const Tensor points = grid(torch::linspace(0, 1, 101, torch::kFloat64));
  const Tensor solution = exact(points);
  const Tensor error = network.forward(points).select(1, 0) - solution;
  return (error.norm() / solution.norm()).item<double>();
}

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

void report(const char* name, double error, int steps, double seconds) {
  std::cout << name << ": relative error " << error << " after " << steps << " steps, " << seconds
            << " seconds\n";
}

// Returns the seconds until the target.
double train_natural_gradient(Network network, const Residuals& residuals, double target) {
  using torchium::optim::NaturalGradient, torchium::optim::NaturalGradientOptions;
  NaturalGradient optimizer(network, NaturalGradientOptions(1.0).momentum(0.0).fisher("ggn"));
  auto& options = static_cast<NaturalGradientOptions&>(optimizer.param_groups().front().options());
  const Stopwatch watch;
  double error = relative_error(network);
  int steps = 0;
  while (error > target && watch.seconds() < 120) {
    optimizer.zero_grad();
    const Tensor r = residuals(network);
    const Tensor loss = r.square().mean();
    optimizer.update_curvature(r.unsqueeze(1), "mse");
    loss.backward();
    options.damping(std::max(kDamping * loss.item<double>(), kLeastDamping));
    optimizer.step();
    ++steps;
    error = relative_error(network);
  }
  report("natural gradient", error, steps, watch.seconds());
  return watch.seconds();
}

void train_adam(Network network, const Residuals& residuals, double seconds) {
  torch::optim::Adam optimizer(network.parameters(), kAdamRate);
  const Stopwatch watch;
  int steps = 0;
  for (double passed = 0; passed < seconds; passed = watch.seconds(), ++steps) {
    optimizer.param_groups().front().options().set_lr(kAdamRate * (1 - passed / seconds));
    optimizer.zero_grad();
    residuals(network).square().mean().backward();
    optimizer.step();
  }
  report("Adam", relative_error(network), steps, watch.seconds());
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const double target = argc > 1 ? std::stod(arguments[0]) : 1e-6;
  const int64_t width = argc > 2 ? std::stoll(arguments[1]) : 24;
  const Residuals residuals(argc > 3 ? std::stoll(arguments[2]) : 30);
  const double time = argc > 4 ? std::stod(arguments[3]) : 1.0;
  torch::manual_seed(0);
  const double seconds = train_natural_gradient(Network(width), residuals, target);
  torch::manual_seed(0);
  train_adam(Network(width), residuals, time * seconds);
}
