#include "support/huge_pages.h"

#include <ATen/ops/empty.h>

#include <cstddef>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace torchium::detail {
namespace {

// From this size on, malloc maps each block separately, so the advice ends with the block.
constexpr size_t kLarge = size_t{32} << 20;

// Only advice: its result does not matter.
void advise_huge_pages(void* data, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + page - 1) / page * page;
  madvise(reinterpret_cast<void*>(first), begin + bytes - first, MADV_HUGEPAGE);
#endif
}

}  // namespace

at::Tensor empty_in_huge_pages(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor result = at::empty(sizes, options);
  if (result.is_cpu() && result.nbytes() > kLarge) {
    advise_huge_pages(result.mutable_data_ptr(), result.nbytes());
  }
  return result;
}

}  // namespace torchium::detail
