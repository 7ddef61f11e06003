#include "support/warn.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

namespace torchium::detail {

void warn_caller(const std::string& message) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("torchium::warn", "");
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
    op.typed<void(std::string)>().call(message);
  } else {
    TORCH_WARN(message);
  }
}

}  // namespace torchium::detail
