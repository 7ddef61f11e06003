// What a pass over some samples must leave as it was: buffers, tables and random numbers; and
// whether it reads values.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <unordered_set>
#include <vector>

namespace torchium::gradients::detail {

// Restores the values of buffers, which modules may change, for example to count calls, and of
// tables that lookups renormalise (max_norm).
class KeptTensors {
 public:
  explicit KeptTensors(const torch::nn::Module& model);
  ~KeptTensors();
  KeptTensors(const KeptTensors&) = delete;
  KeptTensors& operator=(const KeptTensors&) = delete;

  // Between passes, and at the end. A graph that has saved one can then no longer be used.
  void restore();

 private:
  void keep(const at::Tensor& tensor);
  void keep_table(const torch::nn::Module& module);

  struct Entry {
    at::Tensor tensor;
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

// Looks for reads of tensors' values by the host, on this thread, while it exists. What a forward
// pass then does for a sample may depend on others of the batch. Reads of tensors of the model
// alone, such as a temperature, are no matter, nor are those of operators, such as the checks of
// one_hot().
class ValueReads {
 public:
  explicit ValueReads(const torch::nn::Module& model);
  ~ValueReads();
  ValueReads(const ValueReads&) = delete;
  ValueReads& operator=(const ValueReads&) = delete;

  bool found() const { return found_; }

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function);
  static void end(const at::RecordFunction& function, at::ObserverContext* context);
  void look(const at::RecordFunction& function);

  std::unordered_set<const void*> own_storages_;
  int64_t depth_ = 0;  // of operators that run
  bool found_ = false;
  at::CallbackHandle callback_;
  static thread_local ValueReads* current_;
};

}  // namespace torchium::gradients::detail
