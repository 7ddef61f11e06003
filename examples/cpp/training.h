// One training run with a budget, and its records.
#pragma once

#include "image_data.h"

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// Makes the optimizer for a model's parameters.
using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(const torch::nn::Module&)>;

// The limit of one run: `steps`, or `seconds` of training without evaluation.
struct Budget {
  std::optional<int64_t> steps;
  double seconds = 30.0;

  // The fraction used, 0 to 1.
  double progress(int64_t used_steps, double used_seconds) const;
};

struct Run {
  std::string label;
  std::string model;
  MakeOptimizer make_optimizer;
  Budget budget;
  int64_t batch_size = 128;
  uint64_t seed = 1;
};

// A point of the loss curve: the loss on the first 2,000 training images.
struct Record {
  int64_t steps;
  double seconds;
  double loss;
};

struct Result {
  std::string label;
  std::vector<Record> curve;
  double test_accuracy = 0.0;

  // The first point with a loss of at most `target`.
  std::optional<Record> first_below(double target) const;
};

// Trains a fresh model. The same seed gives the same weights and batches. The learning rate decays
// linearly to zero over the budget.
Result train(const Run& run, const ImageData& data);
