#include "linalg/spectral/batched_syev.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#ifdef TORCHIUM_WITH_CUDA
#include "support/cusolver.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::linalg::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

using torchium::detail::check_cusolver;
using torchium::detail::cusolver;
using torchium::detail::CusolverLease;

// More matrices are solved in parts: 1 GiB keeps a GPU busy.
constexpr size_t kWorkspaceBytes = size_t{1} << 30;
// cuSOLVER counts the elements of a batch in 32 bits.
constexpr int64_t kElements = int64_t{1} << 30;

cudaDataType cuda_type(const at::Tensor& A) {
  return A.scalar_type() == at::kFloat ? CUDA_R_32F : CUDA_R_64F;
}

struct Workspace {
  size_t device = 0, host = 0;  // bytes
};

// One part of the batch.
struct Part {
  const CusolverLease& solver;
  at::Tensor values, vectors;  // [count, n], [count, n, n]

  int64_t count() const { return values.size(0); }
  int64_t n() const { return values.size(1); }

  Workspace workspace(int64_t matrices) const {
    Workspace bytes;
    check_cusolver(
        cusolver().syev_batched_buffer_size(
            solver.handle(), solver.params(), CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, n(),
            cuda_type(values), vectors.data_ptr(), n(), cuda_type(values), values.data_ptr(),
            cuda_type(values), &bytes.device, &bytes.host, matrices),
        "cusolverDnXsyevBatched_bufferSize");
    return bytes;
  }

  void solve(const at::Tensor& device_buffer, void* host_buffer, const Workspace& bytes,
             const at::Tensor& info) const {
    check_cusolver(
        cusolver().syev_batched(solver.handle(), solver.params(), CUSOLVER_EIG_MODE_VECTOR,
                                CUBLAS_FILL_MODE_LOWER, n(), cuda_type(values), vectors.data_ptr(),
                                n(), cuda_type(values), values.data_ptr(), cuda_type(values),
                                device_buffer.data_ptr(), bytes.device, host_buffer, bytes.host,
                                info.data_ptr<int>(), count()),
        "cusolverDnXsyevBatched");
  }
};

}  // namespace

bool has_batched_syev(const at::Tensor& S) { return S.is_cuda(); }

void batched_syev_(at::Tensor& values, at::Tensor& vectors) {
  const c10::cuda::CUDAGuard device_guard(values.device());
  CusolverLease solver(c10::cuda::getCurrentCUDAStream());
  const int64_t matrices = values.size(0);
  const int64_t n = values.size(1);
  const at::Tensor info = at::empty({matrices}, values.options().dtype(at::kInt));

  int64_t part = std::clamp<int64_t>(kElements / (n * n), 1, matrices);
  const size_t wanted = Part{solver, values, vectors}.workspace(part).device;
  if (wanted > kWorkspaceBytes) {
    part = std::max<int64_t>(1, static_cast<int64_t>(part * (kWorkspaceBytes / double(wanted))));
  }
  const Workspace bytes = Part{solver, values, vectors}.workspace(part);
  const at::Tensor buffer =
      at::empty({static_cast<int64_t>(bytes.device)}, values.options().dtype(at::kByte));
  for (int64_t begin = 0; begin < matrices; begin += part) {
    const int64_t end = std::min(matrices, begin + part);
    const Part range{solver, values.slice(0, begin, end), vectors.slice(0, begin, end)};
    const Workspace needed = end - begin == part ? bytes : range.workspace(end - begin);
    TORCH_INTERNAL_ASSERT(needed.device <= bytes.device);
    range.solve(buffer, solver.host_workspace(needed.host), needed, info.slice(0, begin, end));
  }
  const at::Tensor failed = info.ne(0);
  values.masked_fill_(failed.view({-1, 1}), std::numeric_limits<double>::quiet_NaN());
  vectors.masked_fill_(failed.view({-1, 1, 1}), std::numeric_limits<double>::quiet_NaN());
}

#else

bool has_batched_syev(const at::Tensor& S) { return false; }

void batched_syev_(at::Tensor& values, at::Tensor& vectors) {
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
}

#endif

}  // namespace torchium::linalg::detail
