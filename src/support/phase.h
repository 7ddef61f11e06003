// Names parts of the work in profiles: of torch.profiler, and as NVTX ranges under emit_nvtx().
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <cstdint>

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

// Until the end of the scope a profile that records shapes sees that the kernels launched here,
// which are no operators, take this many floating point operations, and read and write this many
// bytes: arguments of the range "torchium::work".
class KernelWork {
 public:
  KernelWork(int64_t flops, int64_t bytes) : record_(at::RecordScope::FUNCTION) {
    if (record_.isActive()) {
      const c10::IValue counts[] = {flops, bytes};
      record_.before("torchium::work", c10::ArrayRef<const c10::IValue>(counts, 2));
    }
  }

 private:
  at::RecordFunction record_;
};

}  // namespace torchium::detail
