// Names a part of the work in profiles: of torch.profiler, and as NVTX ranges under emit_nvtx().
#pragma once

#include <ATen/record_function.h>

namespace torchium::detail {

// From here to the end of the scope. name: a literal.
class Phase {
 public:
  explicit Phase(const char* name) : record_(at::RecordScope::FUNCTION) {
    if (record_.isActive()) {
      record_.before(name);
    }
  }

 private:
  at::RecordFunction record_;
};

}  // namespace torchium::detail
