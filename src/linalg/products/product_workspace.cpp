#include "linalg/products/product_workspace.h"

#include <torchium/memory.h>

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

#ifdef TORCHIUM_WITH_CUDA
#include "support/stream_capture.h"

#include <c10/cuda/CUDAFunctions.h>
#endif

namespace torchium::linalg::detail {
namespace {

// Results and workspaces up to this size are allocated without querying the free memory.
constexpr int64_t kSmallBytes = int64_t{64} << 20;
constexpr int64_t kFreeMemoryFraction = 4;

#ifdef TORCHIUM_WITH_CUDA
bool is_in_pinned_memory(const at::Tensor& x) { return x.is_cpu() && x.is_pinned(); }

// A capture must not depend on the free memory.
bool fits(const c10::Device& device, double bytes) {
  return bytes <= kSmallBytes || torchium::detail::is_capturing(device) ||
         bytes <= static_cast<double>(free_memory(device) - kSmallBytes);
}

ProductPlacement streamed(const c10::Device& device, const at::TensorOptions& result) {
  TORCH_CHECK(!torchium::detail::is_capturing(device),
              "chunked_matmul: an operand is in host memory, for which the host waits; this cannot "
              "be captured in a CUDA graph. Move the operands to ",
              device, " before.");
  return {device, result, true};
}
#endif

}  // namespace

ProductPlacement product_placement(const at::Tensor& A, const at::Tensor& B,
                                   at::IntArrayRef sizes) {
#ifdef TORCHIUM_WITH_CUDA
  const at::TensorOptions pinned = A.options().device(at::kCPU).pinned_memory(true);
  if (A.is_cuda() || B.is_cuda()) {
    const c10::Device device = A.is_cuda() ? A.device() : B.device();
    const double bytes =
        static_cast<double>(c10::multiply_integers(sizes)) * static_cast<double>(A.element_size());
    const at::TensorOptions on_device = A.options().device(device).pinned_memory(false);
    if (!fits(device, bytes)) return streamed(device, pinned);
    return A.device() == B.device() ? ProductPlacement{device, on_device, false}
                                    : streamed(device, on_device);
  }
  if (at::hasCUDA() && (is_in_pinned_memory(A) || is_in_pinned_memory(B))) {
    return streamed({at::kCUDA, c10::cuda::current_device()}, pinned);
  }
#endif
  TORCH_CHECK_VALUE(A.device() == B.device(), "chunked_matmul: B is on ", B.device(), " and A on ",
                    A.device(), "; move one of them with .to(device)");
  return {A.device(), A.options(), false};
}

int64_t workspace_budget(c10::Device device, std::optional<int64_t> requested, double everything) {
  if (requested) return *requested;
  const int64_t limit = workspace_limit().value_or(std::numeric_limits<int64_t>::max());
  if (everything <= static_cast<double>(std::min(limit, kSmallBytes))) {
    return static_cast<int64_t>(everything);
  }
  const int64_t free = free_memory(device);
  return std::min({std::max(kSmallBytes, free / kFreeMemoryFraction), free, limit});
}

void check_budget(const char* op, const at::Tensor& A, const at::Tensor& B, int64_t budget,
                  int64_t least) {
  TORCH_CHECK_VALUE(budget >= least, op, ": max_workspace_bytes is ", budget,
                    "; one element of the product of [", A.size(-2), ", ", A.size(-1), "] and [",
                    B.size(-2), ", ", B.size(-1), "] needs ", least);
}

}  // namespace torchium::linalg::detail
