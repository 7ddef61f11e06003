// Operators by name, for functions that go through the dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <utility>

namespace torchium::ops {

// Of torchium; `name` includes that of the overload, as in "eigh.list".
template <typename Function>
auto find_operator(const std::string& name) {
  const size_t end = name.find('.');
  const std::string overload = end == std::string::npos ? "" : name.substr(end + 1);
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(("torchium::" + name.substr(0, end)).c_str(), overload.c_str())
      .typed<Function>();
}

// Calls the operator. `kernel`: one of its kernels, whose signature it has.
template <auto* kernel, typename... Arguments>
decltype(auto) call_operator(const char* name, Arguments&&... arguments) {
  static const auto op = find_operator<std::remove_pointer_t<decltype(kernel)>>(name);
  return op.call(std::forward<Arguments>(arguments)...);
}

}  // namespace torchium::ops
