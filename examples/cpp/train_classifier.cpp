// Trains an image classifier with one optimizer, or compares several with one budget. See kUsage.
#include "image_data.h"
#include "report.h"
#include "training.h"
#include <torchium/torchium.h>

#include <torch/torch.h>

#include <charconv>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace {

constexpr const char* kUsage = R"(Usage: train_classifier [options]
  --optimizer NAME   shampoo (default), kfac, naturalgradient, adagrad, sgd or adamw
  --compare          all six, one after the other, under the same budget
  --lr LR            learning rate of --optimizer (default: the best of a small grid)
  --model NAME       mlp (default) or convnet
  --steps N          budget of a run in steps
  --seconds S        budget of a run in seconds of training (default: 30)
  --batch-size N     default: 128
  --target LOSS      training loss to reach (default: 0.25)
  --seed N           of the weights and the batches (default: 1)
  --device NAME      cpu, cuda, ... (default: cuda where there is one)
  --data-dir PATH    folder of the four IDX files (default: /usr/share/datasets/fashion-mnist)
  --csv PATH         also write the loss curves: optimizer,steps,seconds,loss
)";

using OptimizerPointer = std::unique_ptr<torch::optim::Optimizer>;

// An optimizer with the best settings of docs/choosing_and_tuning.md, for either model.
struct Choice {
  std::map<std::string, double> learning_rates;
  std::function<OptimizerPointer(const torch::nn::Module&, double)> make;
};

template <typename Optimizer, typename Options>
Choice choice(double mlp_rate, double convnet_rate, Options options) {
  return {{{"mlp", mlp_rate}, {"convnet", convnet_rate}},
          [options](const torch::nn::Module& model, double lr) mutable -> OptimizerPointer {
            options.lr(lr);
            if constexpr (std::is_constructible_v<Optimizer, const torch::nn::Module&, Options>) {
              return std::make_unique<Optimizer>(model, options);
            } else {
              return std::make_unique<Optimizer>(model.parameters(), options);
            }
          }};
}

const std::map<std::string, Choice>& choices() {
  using namespace torchium::optim;
  using torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::SGD,
      torch::optim::SGDOptions;
  static const std::map<std::string, Choice> all{
      {"adagrad", choice<Adagrad>(0.02, 0.04, AdagradOptions())},
      {"adamw", choice<AdamW>(0.002, 0.008, AdamWOptions())},
      {"kfac", choice<KFAC>(0.01, 0.01, KFACOptions().damping(0.01).TCov(5).TInv(20))},
      {"naturalgradient",
       choice<NaturalGradient>(6.0, 6.0, NaturalGradientOptions().damping(30.0).momentum(0.9))},
      {"sgd", choice<SGD>(0.1, 0.1, SGDOptions(0.1).momentum(0.9))},
      {"shampoo",
       choice<Shampoo>(
           0.003, 0.01,
           ShampooOptions().betas({0.9, 1.0}).grafting("adam").update_freq(20).block_size(256))}};
  return all;
}

struct Arguments {
  std::vector<std::string> optimizers{"shampoo"};
  std::optional<double> lr;
  std::string model = "mlp";
  Budget budget;
  int64_t batch_size = 128;
  double target = 0.25;
  uint64_t seed = 1;
  std::string device = torch::cuda::is_available() ? "cuda" : "cpu";
  std::filesystem::path data_dir = kSystemDirectory;
  std::filesystem::path csv;
};

template <typename Number>
Number positive(const std::string& name, const std::string& text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value > 0)) {
    throw std::invalid_argument(name + " is '" + text + "'; it must be a positive number");
  }
  return value;
}

// Throws std::invalid_argument for arguments that are not in kUsage.
Arguments parse(const std::vector<std::string>& words) {
  Arguments a;
  bool compare = false;
  const std::map<std::string, std::function<void(const std::string&, const std::string&)>> setters{
      {"--optimizer", [&](auto&, auto& v) { a.optimizers = {v}; }},
      {"--lr", [&](auto& n, auto& v) { a.lr = positive<double>(n, v); }},
      {"--model", [&](auto&, auto& v) { a.model = v; }},
      {"--steps", [&](auto& n, auto& v) { a.budget.steps = positive<int64_t>(n, v); }},
      {"--seconds", [&](auto& n, auto& v) { a.budget.seconds = positive<double>(n, v); }},
      {"--batch-size", [&](auto& n, auto& v) { a.batch_size = positive<int64_t>(n, v); }},
      {"--target", [&](auto& n, auto& v) { a.target = positive<double>(n, v); }},
      {"--seed", [&](auto& n, auto& v) { a.seed = positive<uint64_t>(n, v); }},
      {"--device", [&](auto&, auto& v) { a.device = v; }},
      {"--data-dir", [&](auto&, auto& v) { a.data_dir = v; }},
      {"--csv", [&](auto&, auto& v) { a.csv = v; }}};
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--compare") {
      compare = true;
      a.optimizers = {"adagrad", "kfac", "naturalgradient", "shampoo", "adamw", "sgd"};
      continue;
    }
    const auto setter = setters.find(words[i]);
    if (setter == setters.end() || i + 1 == words.size()) {
      throw std::invalid_argument("cannot read '" + words[i] + "'");
    }
    setter->second(words[i], words[i + 1]);
    ++i;
  }
  if (compare && (a.lr || a.optimizers.size() == 1)) {
    throw std::invalid_argument("--lr and --optimizer do not go with --compare");
  }
  if (a.model != "mlp" && a.model != "convnet") {
    throw std::invalid_argument("--model is '" + a.model + "'; it must be mlp or convnet");
  }
  for (const auto& name : a.optimizers) {
    if (choices().count(name) == 0) {
      throw std::invalid_argument(
          "--optimizer is '" + name +
          "'; it must be shampoo, kfac, naturalgradient, adagrad, sgd or adamw");
    }
  }
  return a;
}

void run(const Arguments& a) {
  const ImageData data = load_image_data(a.data_dir).to(torch::Device(a.device));
  std::vector<Result> results;
  for (const auto& name : a.optimizers) {
    const Choice& choice = choices().at(name);
    const auto make = [&](const torch::nn::Module& model) {
      return choice.make(model, a.lr.value_or(choice.learning_rates.at(a.model)));
    };
    results.push_back(train({name, a.model, make, a.budget, a.batch_size, a.seed}, data));
  }
  std::cout << a.model << ", batch " << a.batch_size << ", " << a.device << ", "
            << torch::get_num_threads() << " threads\n";
  print_table(std::cout, results, a.target);
  if (!a.csv.empty()) {
    write_curves(a.csv, results);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words == std::vector<std::string>{"--help"}) {
    std::cout << kUsage;
    return 0;
  }
  try {
    run(parse(words));
  } catch (const std::invalid_argument& error) {
    std::cerr << error.what() << "\n\n" << kUsage;
    return 2;
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
