// Pointers to the nodes of autograd's graph: a std::shared_ptr in torch 2.11, a c10::intrusive_ptr
// in 2.15.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace torchium::gradients::detail {

using NodePointer = std::remove_cvref_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;

template <typename T>
std::weak_ptr<T> weak_pointer(const std::shared_ptr<T>& pointer) {
  return pointer;
}

template <typename T>
c10::weak_intrusive_ptr<T> weak_pointer(const c10::intrusive_ptr<T>& pointer) {
  return c10::weak_intrusive_ptr<T>(pointer);
}

// A node that is not kept alive.
class WeakNode {
 public:
  WeakNode() = default;
  WeakNode(const NodePointer& node) : node_(weak_pointer(node)) {}

  NodePointer lock() const { return node_ ? node_->lock() : NodePointer(); }
  bool expired() const { return !node_ || node_->expired(); }

 private:
  // An intrusive weak pointer cannot be empty.
  std::optional<decltype(weak_pointer(std::declval<NodePointer>()))> node_;
};

}  // namespace torchium::gradients::detail
