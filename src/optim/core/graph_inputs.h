// Inputs of a step whose addresses change from step to step: a CUDA graph reads copies of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

namespace torchium::optim::detail {

// Everything that the launches of a step depend on except the options, the state tensors, and the
// values of the inputs that a graph reads from copies.
using GraphKey = std::vector<uint8_t>;

template <typename T>
requires std::is_trivially_copyable_v<T>
void add_bytes(GraphKey& key, const T& value) {
  const size_t size = key.size();
  key.resize(size + sizeof(T));
  std::memcpy(key.data() + size, &value, sizeof(T));
}

// The dtype, sizes, strides and alignment of a tensor.
void add_layout(GraphKey& key, const at::Tensor& tensor);

// Settings of PyTorch that its kernels depend on.
void add_global_settings(GraphKey& key);

// Copies of tensors on a device and of 0-dim float64 numbers on the CPU, and found_inf.
class GraphInputs {
 public:
  // Allocates copies of inputs with this layout. A tensor that is listed twice has one copy.
  GraphInputs(at::TensorList inputs, c10::Device device);

  // Adds the layouts of the inputs, which decide whether other inputs fit the same copies.
  static void add_layouts(GraphKey& key, at::TensorList inputs);
  // Bytes of the copies.
  static int64_t bytes_of(at::TensorList inputs);

  // Copies inputs of this layout in few launches on the stream; numbers only if they have changed.
  // found_inf: one number on the device; undefined: 0.
  void set(at::TensorList inputs, const at::Tensor& found_inf, c10::Stream stream);

  at::TensorList copies() const { return copies_; }
  const at::Tensor& found_inf() const { return found_inf_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::vector<at::Tensor> copies_;              // of each input, in its layout
  std::vector<std::optional<double>> numbers_;  // on the device; none: no number, or not known
  std::vector<bool> is_first_;                  // of the inputs that are the same tensor
  at::Tensor found_inf_;                        // 0-dim float32
  bool found_inf_is_zero_ = true;
  int64_t bytes_ = 0;
  std::optional<c10::Stream> stream_;  // of the last set()
};

}  // namespace torchium::optim::detail
