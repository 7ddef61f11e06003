// Fake implementation of an operator that changes its arguments in place and returns nothing.
#pragma once

namespace torchium::ops {

template <auto* kernel>
struct InPlaceFake;
template <typename... Args, void (*kernel)(Args...)>
struct InPlaceFake<kernel> {
  static void call(Args...) {}
};

}  // namespace torchium::ops
