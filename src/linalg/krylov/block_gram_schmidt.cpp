#include "linalg/krylov/block_gram_schmidt.h"

#include "linalg/common/operator_checks.h"
#include "linalg/common/precision.h"

#include <ATen/ATen.h>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/krylov/block_orthogonalise.h"
#include "support/device_code.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace torchium::linalg::detail {
namespace {

// Of a normalised row, no more than this is noise.
constexpr double kNoise = 0.1;

// W -= (V W^T)^T V for rows V and W. Returns the coefficients V W^T.
at::Tensor project_out_(at::Tensor W, const at::Tensor& V) {
  at::Tensor C = V.matmul(W.mT());
  W.addmm_(C.mT(), V, /*beta=*/1, /*alpha=*/-1);
  return C;
}

// Makes the first half W of the rows orthonormal by modified Gram-Schmidt and returns R with the
// former W = R^T W. A row of which no more than `least` is left is replaced by the largest of the
// second half, which lose their part in W. The pivot is the largest row that is left: where it is
// noise, so are the others, and their coefficients.
at::Tensor orthonormalise_(const at::Tensor& rows, const at::Tensor& least) {
  const int64_t count = rows.size(0) / 2;
  at::Tensor W = rows.narrow(0, 0, count);
  const at::Tensor Q = at::empty_like(W);
  at::Tensor R = at::zeros({count, count}, rows.options());
  for (int64_t j = 0; j < count; ++j) {
    const at::Tensor lengths = norms(rows, 1);
    const at::Tensor p = lengths.narrow(0, 0, count).argmax(0, /*keepdim=*/true);
    const at::Tensor spare = lengths.narrow(0, count, count).argmax(0, /*keepdim=*/true) + count;
    const at::Tensor is_left = lengths.index_select(0, p) > least.index_select(0, p);
    const at::Tensor from = at::where(is_left, p, spare);
    const at::Tensor length = lengths.index_select(0, from);
    const at::Tensor q = (rows.index_select(0, from) / length.unsqueeze(1)).to(rows.scalar_type());
    const at::Tensor coefficients = rows.matmul(q.mT());
    rows.addmm_(coefficients, q, /*beta=*/1, /*alpha=*/-1);
    rows.index_fill_(0, at::cat({p, from}), 0);
    at::Tensor row = R[j];
    row.copy_(coefficients.narrow(0, 0, count).select(1, 0));
    row.index_copy_(0, p, (length * is_left).to(rows.scalar_type()));
    Q[j].copy_(q[0]);
  }
  W.copy_(Q);
  return R;
}

#ifdef TORCHIUM_WITH_CUDA
bool has_device_kernel(const at::Tensor& rows, int64_t block) {
  return rows.is_cuda() && rows.scalar_type() == at::kFloat && rows.is_contiguous() &&
         cuda_kernels::can_orthogonalise(block);
}

void orthogonalise_on_device(const at::Tensor& rows, int64_t known, int64_t block,
                             const at::Tensor& projection) {
  torchium::detail::check_device_code(rows.device());
  const c10::cuda::CUDAGuard device_guard(rows.device());
  const int64_t n = rows.size(1);
  const at::Tensor workspace = at::empty({cuda_kernels::block_orthogonalise_workspace(
                                             static_cast<int>(known), static_cast<int>(block), n)},
                                         rows.options().dtype(at::kDouble));
  const cuda_kernels::BlockOrthogonalise arguments{
      .rows = rows.mutable_data_ptr<float>(),
      .n = n,
      .known = static_cast<int>(known),
      .block = static_cast<int>(block),
      .epsilon = epsilon_of(at::kFloat),
      .noise = kNoise,
      .projection = projection.defined() ? projection.mutable_data_ptr<double>() : nullptr,
      .row_stride = projection.defined() ? projection.stride(0) : 0,
      .workspace = workspace.mutable_data_ptr<double>()};
  C10_CUDA_CHECK(cuda_kernels::block_orthogonalise(arguments, c10::cuda::getCurrentCUDAStream()));
}
#endif

}  // namespace

// W = V^T C1 + Q^T R1, and Q = V^T C2 + Q'^T R2, because the first projection leaves rounding
// errors: W = V^T (C1 + C2 R1) + Q'^T R2 R1, up to transposes. Twice is enough (Giraud et al. 2005,
// "The loss of orthogonality in the Gram-Schmidt orthogonalization process"), unless the first
// projection left nothing but rounding errors: then the second leaves little of Q.
void orthogonalise_block(const at::Tensor& rows, int64_t known, const at::Tensor& projection) {
  const int64_t block = (rows.size(0) - known) / 2;
#ifdef TORCHIUM_WITH_CUDA
  if (has_device_kernel(rows, block)) {
    orthogonalise_on_device(rows, known, block, projection);
    return;
  }
#endif
  const at::Tensor V = rows.narrow(0, 0, known);
  const at::Tensor work = rows.narrow(0, known, 2 * block);
  const at::Tensor lengths = norms(work.narrow(0, 0, block), 1);
  const at::Tensor C1 = project_out_(work, V).narrow(1, 0, block);
  const at::Tensor R1 = orthonormalise_(work, lengths * epsilon_of(rows.scalar_type()));
  const at::Tensor C2 = project_out_(work, V).narrow(1, 0, block);
  const at::Tensor R2 = orthonormalise_(work, at::full_like(lengths, kNoise));
  if (projection.defined()) {
    projection.narrow(0, 0, known).copy_(at::addmm(C1, C2, R1));
    projection.narrow(0, known, block).copy_(R2.matmul(R1));
  }
}

}  // namespace torchium::linalg::detail
