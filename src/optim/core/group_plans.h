// The plans of an optimizer in C++ (step_plan.h), one for each parameter group and device.
#pragma once

#include "optim/core/step_plan.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// The learning rate of a group as a plan takes it.
class LearningRate {
 public:
  // 0-dim float64: on the CPU, or in a tensor on `device` that captured steps read.
  at::Tensor of_step(double lr, c10::Device device, bool capturable);
  // Writes `lr` to the tensor on the device, if there is one.
  void sync(double lr);

 private:
  at::Tensor on_device_;
  double value_ = 0.0;
};

struct GroupPlan {
  size_t group;
  c10::intrusive_ptr<StepPlan> plan;
  LearningRate lr;
};

// What the plans of a group were bound with.
struct BoundOptions {
  std::unique_ptr<torch::optim::OptimizerOptions> options;
  std::string layout;                // of the matrices
  std::vector<std::string> buffers;  // keys of the state that these options need
};

struct GroupPlans {
  std::deque<GroupPlan> plans;
  std::vector<BoundOptions> bound;  // one a group; empty: the plans have to be bound first

  // Null: there is none.
  GroupPlan* find(size_t group, c10::Device device);
};

}  // namespace torchium::optim::detail
