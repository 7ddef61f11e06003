// Warnings that show the line of the caller.
#pragma once

#include <c10/util/StringUtil.h>

#include <string>

namespace torchium::detail {

// By Python's warnings, if its package is imported, otherwise as TORCH_WARN. TORCH_WARN shows the
// line of Python that called the core, which is one of the package.
void warn_caller(const std::string& message);

template <typename... Parts>
void warn(const Parts&... parts) {
  warn_caller(c10::str(parts...));
}

}  // namespace torchium::detail
