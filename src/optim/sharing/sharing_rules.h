// What the ranks of a process group need to know of an optimizer to share its step.
//
// A rank computes the directions of the blocks that it owns as steps from zero, whatever the block
// held, with learning rate -1: p = 0 + d. All ranks then apply the directions, with the weight
// decay and the learning rate.
#pragma once

#include "optim/blocked/blocked_plan.h"
#include "optim/blocked/blocking.h"

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace torchium::optim::detail {

class SharingRules {
 public:
  using Options = torch::optim::OptimizerOptions;
  virtual ~SharingRules() = default;

  // Whether a CUDA graph is to capture steps.
  virtual bool capturable(const Options& options) const = 0;
  // Everything that must be the same on all ranks, apart from the learning rate.
  virtual OptionTexts all_options(const Options& options) const = 0;

  // Blocks of one kind of a parameter group are stepped with the same options.
  virtual size_t kinds() const = 0;
  virtual size_t kind(const Options& options, at::IntArrayRef shape) const = 0;
  // As steps cut a parameter of this shape; without block shapes: elements in any order.
  virtual Blocking blocking(const Options& options, at::IntArrayRef shape) const = 0;
  // Elements without matrices are cut at multiples of this in the flat parameter; 0: into
  // rectangles of any shape.
  virtual int64_t unit(const Options& options, size_t kind) const = 0;
  // Whether on a GPU the step of a block of this shape, which is contiguous and has float32 state,
  // updates the parameter that it is cut from (BlockUpdate), and reads a gradient whose rows lie
  // apart.
  virtual bool updates_in_place(size_t kind, at::IntArrayRef sizes) const = 0;
  // Steps between two computations of the roots.
  virtual int64_t root_interval(const Options& options) const = 0;

  // For the blocks of one kind, as parameters of their own: without weight decay, which is added to
  // their gradients or applied after them, and not negated.
  virtual std::shared_ptr<const Options> options_of_blocks(const Options& options,
                                                           size_t kind) const = 0;
  virtual bool maximize(const Options& options) const = 0;
  // Added to the gradient.
  virtual double l2_penalty(const Options& options) const = 0;
  // Subtracted from the parameter.
  virtual double decoupled_decay(const Options& options) const = 0;
};

}  // namespace torchium::optim::detail
