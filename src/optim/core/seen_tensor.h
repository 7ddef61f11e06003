// The identity of a tensor's memory at the time when something was derived from it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <utility>

namespace torchium::optim::detail {

// Address, dtype, device, sizes and strides. All tensors of a model are compared in every step,
// hence the accessors of TensorImpl, which are inline.
class SeenMemory {
 public:
  explicit SeenMemory(const at::Tensor& tensor) {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    address_ = address(impl);
    dtype_ = impl.dtype();
    device_ = impl.device();
    sizes_.append(impl.sizes().begin(), impl.sizes().end());
    strides_.append(impl.strides().begin(), impl.strides().end());
  }

  bool is_of(const at::Tensor& tensor) const {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    const at::IntArrayRef sizes = impl.sizes(), strides = impl.strides();
    bool same = address(impl) == address_ && impl.dtype() == dtype_ && impl.device() == device_ &&
                sizes.size() == sizes_.size();
    for (size_t d = 0; same && d < sizes.size(); ++d) {
      same = sizes[d] == sizes_[d] && strides[d] == strides_[d];
    }
    return same;
  }

 private:
  static const void* address(const c10::TensorImpl& impl) {
    const c10::StorageImpl* storage = impl.unsafe_storage().unsafeGetStorageImpl();
    return storage == nullptr ? nullptr
                              : static_cast<const char*>(storage->data()) +
                                    impl.storage_offset() * impl.itemsize();
  }

  const void* address_ = nullptr;
  caffe2::TypeMeta dtype_;
  c10::Device device_ = at::kCPU;
  c10::SmallVector<int64_t, 4> sizes_, strides_;
};

class SeenTensor {
 public:
  explicit SeenTensor(at::Tensor tensor) : tensor_(std::move(tensor)), memory_(tensor_) {}

  const at::Tensor& tensor() const { return tensor_; }

  // False after `p.data = ...`, module.to(...), set_() and the like.
  bool is_unchanged() const { return memory_.is_of(tensor_); }

 private:
  at::Tensor tensor_;
  SeenMemory memory_;
};

}  // namespace torchium::optim::detail
