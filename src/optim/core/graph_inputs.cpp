#include "optim/core/graph_inputs.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <map>
#include <unordered_map>
#include <utility>

namespace torchium::optim::detail {
namespace {

constexpr uintptr_t kVectorBytes = 16;  // of the widest loads

// Elements by which the address misses it.
int64_t misalignment(const at::Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return static_cast<int64_t>(address % kVectorBytes / tensor.itemsize());
}

// Elements from the first to the last that the tensor has.
int64_t extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return tensor.numel() == 0 ? 0 : last + 1;
}

// In the layout of `tensor`, so that kernels do with both the same.
at::Tensor empty_copy_of(const at::Tensor& tensor) {
  const int64_t first = misalignment(tensor);
  return at::empty({first + extent(tensor)}, tensor.options())
      .as_strided(tensor.sizes(), tensor.strides(), first);
}

// All memory between the first and the last element, for tensors that overlap or have gaps.
at::Tensor memory_of(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() ? tensor : tensor.as_strided({extent(tensor)}, {1});
}

// For each input the first that is the same tensor.
std::vector<size_t> find_first(at::TensorList inputs) {
  std::unordered_map<const at::TensorImpl*, size_t> seen;
  std::vector<size_t> first;
  first.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    first.push_back(seen.try_emplace(inputs[i].unsafeGetTensorImpl(), i).first->second);
  }
  return first;
}

}  // namespace

void add_layout(GraphKey& key, const at::Tensor& tensor) {
  key.push_back(static_cast<uint8_t>(tensor.scalar_type()));
  key.push_back(static_cast<uint8_t>(misalignment(tensor)));
  key.push_back(static_cast<uint8_t>(tensor.dim()));
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    add_bytes(key, tensor.size(d));
    add_bytes(key, tensor.stride(d));
  }
}

void add_global_settings(GraphKey& key) {
  const at::Context& context = at::globalContext();
  for (const auto op : {at::Float32Op::CONV, at::Float32Op::MATMUL}) {
    add_bytes(key, context.float32Precision(at::Float32Backend::CUDA, op));
  }
  key.push_back(context.deterministicAlgorithms());
}

void GraphInputs::add_layouts(GraphKey& key, at::TensorList inputs) {
  const auto first = find_first(inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    add_bytes(key, first[i]);
    key.push_back(inputs[i].is_cpu() ? 1 : 0);
    if (first[i] == i && !inputs[i].is_cpu()) {
      add_layout(key, inputs[i]);
    }
  }
}

int64_t GraphInputs::bytes_of(at::TensorList inputs) {
  const auto first = find_first(inputs);
  int64_t bytes = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    bytes += first[i] == i ? extent(inputs[i]) * static_cast<int64_t>(inputs[i].itemsize()) : 0;
  }
  return bytes;
}

GraphInputs::GraphInputs(at::TensorList inputs, c10::Device device)
    : numbers_(inputs.size()),
      found_inf_(at::zeros({}, at::TensorOptions(at::kFloat).device(device))),
      bytes_(bytes_of(inputs)) {
  const auto first = find_first(inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    is_first_.push_back(first[i] == i);
    copies_.push_back(!is_first_[i] ? copies_[first[i]]
                      : inputs[i].is_cpu()
                          ? at::empty({}, at::TensorOptions(at::kDouble).device(device))
                          : empty_copy_of(inputs[i]));
  }
}

void GraphInputs::set(at::TensorList inputs, const at::Tensor& found_inf, c10::Stream stream) {
  if (stream_ && *stream_ != stream) {
    found_inf_.record_stream(stream);
    for (const at::Tensor& copy : copies_) {
      copy.record_stream(stream);
    }
  }
  stream_ = stream;
  std::map<at::ScalarType, std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>> by_dtype;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!is_first_[i]) {
      continue;
    }
    if (!inputs[i].is_cpu()) {
      if (inputs[i].numel() > 0) {
        auto& [to, from] = by_dtype[inputs[i].scalar_type()];  // _foreach_copy_ is fast for one
        to.push_back(memory_of(copies_[i]));
        from.push_back(memory_of(inputs[i]));
      }
    } else if (const double value = inputs[i].item<double>(); numbers_[i] != value) {
      copies_[i].fill_(value);
      numbers_[i] = value;
    }
  }
  for (const auto& [dtype, tensors] : by_dtype) {
    at::_foreach_copy_(tensors.first, tensors.second);
  }
  if (found_inf.defined()) {
    found_inf_.copy_(found_inf.view(at::IntArrayRef()));
    found_inf_is_zero_ = false;
  } else if (!found_inf_is_zero_) {
    found_inf_.zero_();
    found_inf_is_zero_ = true;
  }
}

}  // namespace torchium::optim::detail
