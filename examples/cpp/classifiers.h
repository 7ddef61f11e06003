// The two networks of the example, and their evaluation.
#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <string>

// "mlp" or "convnet" for images [N, channels, height, width] of ten classes.
torch::nn::Sequential make_model(const std::string& name, torch::IntArrayRef image_shape);

struct Score {
  double loss;      // mean cross entropy
  double accuracy;  // 0 to 1
};

// `images` [N, ...] and `labels` [N], in batches of 1000.
Score evaluate(torch::nn::Sequential& model, const torch::Tensor& images,
               const torch::Tensor& labels);
