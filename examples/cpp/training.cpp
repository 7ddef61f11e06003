#include "training.h"

#include "classifiers.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <unistd.h>

namespace {

constexpr size_t kRecords = 50;         // points of a loss curve
constexpr int64_t kLossSamples = 2000;  // training images on which a point is measured

// Counts seconds while it runs; waits for the GPU when it is stopped.
class Stopwatch {
 public:
  explicit Stopwatch(torch::Device device) : device_(device) {}
  void start() { started_ = Clock::now(); }
  void stop() {
    if (device_.is_cuda()) {
      torch::cuda::synchronize(device_.index());
    }
    counted_ = seconds();
    started_.reset();
  }
  double seconds() const {
    const auto running =
        started_ ? std::chrono::duration<double>(Clock::now() - *started_).count() : 0.0;
    return counted_ + running;
  }

 private:
  using Clock = std::chrono::steady_clock;
  torch::Device device_;
  double counted_ = 0.0;
  std::optional<Clock::time_point> started_;
};

// An endless sequence of shuffled batches.
class Batches {
 public:
  Batches(const ImageData& data, int64_t batch_size, uint64_t seed)
      : data_(data),
        batch_size_(std::min(batch_size, data.train_labels.size(0))),
        generator_(torch::make_generator<torch::CPUGeneratorImpl>(seed)) {}

  std::pair<torch::Tensor, torch::Tensor> next() {
    if (!order_.defined() || position_ + batch_size_ > order_.size(0)) {
      order_ = torch::randperm(data_.train_labels.size(0), generator_, torch::kLong)
                   .to(data_.train_labels.device());
      position_ = 0;
    }
    const auto indices = order_.narrow(0, position_, batch_size_);
    position_ += batch_size_;
    return {data_.train_images.index_select(0, indices),
            data_.train_labels.index_select(0, indices)};
  }

 private:
  const ImageData& data_;
  int64_t batch_size_;
  torch::Generator generator_;
  torch::Tensor order_;
  int64_t position_ = 0;
};

void show_progress(const std::string& label, double progress, const Record& record) {
  if (isatty(STDERR_FILENO) != 0) {
    std::fprintf(stderr, "\r%-12s %3.0f%%  step %6lld  loss %.4f%s", label.c_str(),
                 100.0 * progress, static_cast<long long>(record.steps), record.loss,
                 progress < 1.0 ? "" : "\n");
  }
}

}  // namespace

double Budget::progress(int64_t used_steps, double used_seconds) const {
  const double used = steps ? static_cast<double>(used_steps) / static_cast<double>(*steps)
                            : used_seconds / seconds;
  return std::min(used, 1.0);
}

std::optional<Record> Result::first_below(double target) const {
  const auto found = std::find_if(curve.begin(), curve.end(),
                                  [&](const Record& record) { return record.loss <= target; });
  return found == curve.end() ? std::nullopt : std::optional(*found);
}

Result train(const Run& run, const ImageData& data) {
  torch::manual_seed(run.seed);
  const auto device = data.train_images.device();
  auto model = make_model(run.model, data.train_images.sizes());
  model->to(device);
  const auto optimizer = run.make_optimizer(*model);
  torch::optim::OptimizerOptions& options = optimizer->param_groups()[0].options();
  const double first_lr = options.get_lr();

  const auto loss_images = data.train_images.slice(0, 0, kLossSamples);
  const auto loss_labels = data.train_labels.slice(0, 0, kLossSamples);
  Batches batches(data, run.batch_size, run.seed);
  Stopwatch clock(device);
  Result result{run.label, {}, 0.0};
  int64_t steps = 0;
  double progress = 0.0;
  const auto record = [&] {
    result.curve.push_back(
        {steps, clock.seconds(), evaluate(model, loss_images, loss_labels).loss});
    show_progress(run.label, progress, result.curve.back());
  };

  record();
  while (progress < 1.0) {
    clock.start();
    const double next_record =
        static_cast<double>(result.curve.size()) / static_cast<double>(kRecords);
    while (progress < std::min(next_record, 1.0)) {
      options.set_lr(first_lr * (1.0 - progress));
      const auto [images, labels] = batches.next();
      optimizer->zero_grad();
      torch::nn::functional::cross_entropy(model->forward(images), labels).backward();
      optimizer->step();
      ++steps;
      progress = run.budget.progress(steps, clock.seconds());
    }
    clock.stop();
    record();
    if (!std::isfinite(result.curve.back().loss)) {
      std::fprintf(stderr, "%s has diverged after %lld steps\n", run.label.c_str(),
                   static_cast<long long>(steps));
      break;
    }
  }
  result.test_accuracy = evaluate(model, data.test_images, data.test_labels).accuracy;
  return result;
}
