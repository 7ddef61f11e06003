// What a pass over some samples must leave as it was: buffers and random numbers.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <vector>

namespace torchium::gradients::detail {

// Restores the values of buffers, which modules may change, for example to count calls.
class KeptBuffers {
 public:
  explicit KeptBuffers(const torch::nn::Module& model);
  ~KeptBuffers();
  KeptBuffers(const KeptBuffers&) = delete;
  KeptBuffers& operator=(const KeptBuffers&) = delete;

  // Between passes, and at the end. A graph that has saved a buffer can then no longer be used.
  void restore();

 private:
  struct Entry {
    at::Tensor buffer;
    at::Tensor value;
    int64_t version;
  };
  std::vector<Entry> kept_;
};

// Restores the state of the default generators of random numbers, and watches for others.
class KeptRandomState {
 public:
  // Of the devices of these tensors, and of the CPU.
  explicit KeptRandomState(at::TensorList tensors);
  ~KeptRandomState();
  KeptRandomState(const KeptRandomState&) = delete;
  KeptRandomState& operator=(const KeptRandomState&) = delete;

  void restore();
  bool has_drawn();

 private:
  std::vector<at::Tensor> read();

  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> states_;
  at::CallbackHandle callback_;
};

}  // namespace torchium::gradients::detail
