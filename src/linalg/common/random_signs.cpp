#include "linalg/common/random_signs.h"

#include "cuda_kernels/common/philox.h"
#include "support/no_transforms.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/common/random_signs.h"
#include "support/device_code.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::linalg::detail {
namespace {

constexpr int64_t kGroupsPerTask = 4096;

template <typename T>
void fill_on_cpu(T* out, int64_t rows, int64_t n, uint64_t seed, uint64_t first_stream) {
  const int64_t groups = (n + 3) / 4;
  at::parallel_for(0, rows * groups, kGroupsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / groups;
      cuda_kernels::write_signs(out + row * n, n, seed, first_stream + row, i % groups);
    }
  });
}

#ifdef TORCHIUM_WITH_CUDA
template <typename T>
void fill_on_cuda(const at::Tensor& rows, uint64_t seed, uint64_t first_stream) {
  torchium::detail::check_device_code(rows.device());
  const c10::cuda::CUDAGuard device_guard(rows.device());
  cuda_kernels::random_signs(rows.mutable_data_ptr<T>(), rows.size(0), rows.size(1), seed,
                             first_stream, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}
#endif

}  // namespace

void random_signs_(const at::Tensor& rows, uint64_t seed, uint64_t first_stream) {
  TORCH_INTERNAL_ASSERT(rows.is_contiguous());
  AT_DISPATCH_FLOATING_TYPES(rows.scalar_type(), "random_signs", [&] {
#ifdef TORCHIUM_WITH_CUDA
    if (rows.is_cuda()) {
      fill_on_cuda<scalar_t>(rows, seed, first_stream);
      return;
    }
#endif
    fill_on_cpu(rows.mutable_data_ptr<scalar_t>(), rows.size(0), rows.size(1), seed, first_stream);
  });
}

at::Tensor random_signs(int64_t n, int64_t columns, uint64_t seed, uint64_t first_stream,
                        const at::TensorOptions& options) {
  const torchium::detail::NoTransforms no_transforms;
  const at::Tensor rows = at::empty({columns, n}, options);
  random_signs_(rows, seed, first_stream);
  return rows.mT();
}

}  // namespace torchium::linalg::detail
