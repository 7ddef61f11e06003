#include "gradients/capture/backward_pass.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>
#include <vector>

namespace torchium::gradients::detail {
namespace {

struct RunningTask {
  int64_t task;
  std::weak_ptr<const void> running;
  BackwardPass pass;
};

thread_local std::vector<RunningTask> running_tasks;  // each within the one before

}  // namespace

BackwardPass pass_of_forward() {
  while (!running_tasks.empty() && running_tasks.back().running.expired()) {
    running_tasks.pop_back();
  }
  const int64_t task = torch::autograd::get_current_graph_task_id();
  if (task < 0) {
    return {};
  }
  for (const RunningTask& known : running_tasks) {
    if (known.task == task) {
      return known.pass;
    }
  }
  auto running = watch_task();
  const BackwardPass pass =
      running_tasks.empty() ? BackwardPass{task, running} : running_tasks.back().pass;
  running_tasks.push_back({task, std::move(running), pass});
  return pass;
}

std::weak_ptr<const void> watch_task() {
  // The graph task owns its callbacks, also if it fails.
  auto token = std::make_shared<const char>();
  std::weak_ptr<const void> running = token;
  torch::autograd::Engine::get_default_engine().queue_callback([token = std::move(token)] {});
  return running;
}

}  // namespace torchium::gradients::detail
