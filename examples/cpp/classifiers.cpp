#include "classifiers.h"

#include <torch/torch.h>

namespace nn = torch::nn;

nn::Sequential make_model(const std::string& name, torch::IntArrayRef image_shape) {
  constexpr int64_t kClasses = 10;
  const int64_t channels = image_shape[1];
  const int64_t height = image_shape[2];
  const int64_t width = image_shape[3];
  if (name == "mlp") {
    return nn::Sequential(nn::Flatten(), nn::Linear(channels * height * width, 512), nn::ReLU(),
                          nn::Linear(512, 512), nn::ReLU(), nn::Linear(512, kClasses));
  }
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(channels, 16, 3).padding(1)), nn::ReLU(),
                        nn::MaxPool2d(2), nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1)),
                        nn::ReLU(), nn::MaxPool2d(2), nn::Flatten(),
                        nn::Linear(32 * (height / 4) * (width / 4), 128), nn::ReLU(),
                        nn::Linear(128, kClasses));
}

Score evaluate(nn::Sequential& model, const torch::Tensor& images, const torch::Tensor& labels) {
  const torch::NoGradGuard no_grad;
  constexpr int64_t kBatch = 1000;
  const bool training = model->is_training();
  model->eval();
  double loss = 0.0;
  double correct = 0.0;
  const auto label_batches = labels.split(kBatch);
  const auto image_batches = images.split(kBatch);
  for (size_t i = 0; i < image_batches.size(); ++i) {
    const auto logits = model->forward(image_batches[i]);
    loss += nn::functional::cross_entropy(
                logits, label_batches[i],
                nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum))
                .item<double>();
    correct += logits.argmax(1).eq(label_batches[i]).sum().item<double>();
  }
  model->train(training);
  const auto count = static_cast<double>(labels.size(0));
  return {loss / count, correct / count};
}
