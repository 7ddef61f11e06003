// A tensor as it was when something was derived from its address, shape or dtype.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <utility>

namespace torchium::optim::detail {

class SeenTensor {
 public:
  explicit SeenTensor(at::Tensor tensor)
      : tensor_(std::move(tensor)),
        data_(address()),
        dtype_(tensor_.scalar_type()),
        device_(tensor_.device()),
        sizes_(tensor_.sizes()),
        strides_(tensor_.strides()) {}

  const at::Tensor& tensor() const { return tensor_; }

  // False after `p.data = ...`, module.to(...), set_() and the like.
  bool is_unchanged() const {
    return address() == data_ && tensor_.scalar_type() == dtype_ && tensor_.device() == device_ &&
           tensor_.sizes() == at::IntArrayRef(sizes_) &&
           tensor_.strides() == at::IntArrayRef(strides_);
  }

 private:
  const void* address() const { return tensor_.has_storage() ? tensor_.const_data_ptr() : nullptr; }

  at::Tensor tensor_;
  const void* data_;
  at::ScalarType dtype_;
  c10::Device device_;
  c10::SmallVector<int64_t, 4> sizes_, strides_;
};

}  // namespace torchium::optim::detail
