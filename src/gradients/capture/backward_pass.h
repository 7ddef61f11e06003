// Backward passes of the user. Reentrant checkpointing runs graph tasks of autograd within others;
// all of them belong to the pass of the outermost one.
#pragma once

#include <cstdint>
#include <memory>

namespace torchium::gradients::detail {

struct BackwardPass {
  int64_t task = -1;                  // the outermost graph task; -1: none
  std::weak_ptr<const void> running;  // expires when that has ended or failed
};

// The backward pass that runs the forward pass at this point of the thread. It is known to be
// within another one if that was asked for on this thread too.
BackwardPass pass_of_forward();

// Expires when the graph task that runs on this thread has ended or failed.
std::weak_ptr<const void> watch_task();

}  // namespace torchium::gradients::detail
