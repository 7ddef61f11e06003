// Operators by name, for functions that go through the dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace torchium::ops {

template <typename Function>
auto find_operator(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Function>();
}

// With the signature of the function that is given.
template <typename Function>
auto find_operator(const char* name, Function*, const char* overload = "") {
  return find_operator<Function>(name, overload);
}

}  // namespace torchium::ops
