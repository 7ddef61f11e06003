// Registration of operators, one statement each.
#pragma once

#include "support/no_autocast.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

namespace torchium::ops {

inline void call_without_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const torchium::detail::NoAutocast no_autocast;
  op.callBoxed(stack);
}

// Declares an operator. Under autocast it computes as without: a root or a statistic in half
// precision would be wrong, and state must keep its dtype. Returns its name.
inline std::string declare(torch::Library& m, const char* schema) {
  m.def(schema);
  std::string name(schema, std::strchr(schema, '('));
  for (const auto key : {c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA}) {
    m.impl(
        name.c_str(),
        torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&call_without_autocast>()));
  }
  return name;
}

// An operator that is made of other operators: traced, differentiated and faked as these are.
template <typename Kernel>
void define_composite(torch::Library& m, const char* schema, Kernel kernel) {
  m.impl(declare(m, schema).c_str(),
         torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, kernel));
}

// An operator with a kernel for every backend, so that one that does not fit reaches its checks.
// `meta`: shapes and dtypes alone. Null: there is none.
template <typename Kernel, typename Meta = std::nullptr_t, typename Autograd = std::nullptr_t>
void define(torch::Library& m, const char* schema, Kernel kernel, Meta meta = nullptr,
            Autograd autograd = nullptr) {
  const std::string name = declare(m, schema);
  const auto add = [&](c10::DispatchKey key, auto&& function) {
    if constexpr (!std::is_null_pointer_v<std::decay_t<decltype(function)>>) {
      m.impl(name.c_str(), torch::dispatch(key, std::forward<decltype(function)>(function)));
    }
  };
  add(c10::DispatchKey::CompositeExplicitAutograd, kernel);
  add(c10::DispatchKey::Meta, meta);
  add(c10::DispatchKey::Autograd, std::move(autograd));
}

}  // namespace torchium::ops
