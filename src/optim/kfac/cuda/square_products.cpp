#include "optim/kfac/cuda/square_products.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/split_gemm/batched_product.h"
#include "linalg/products/batched_products.h"
#include "optim/core/cuda/kernel_tables.h"
#include "optim/core/cuda/kernel_tensors.h"
#include "optim/kfac/cuda/split_products.h"
#include "support/phase.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>
#include <optional>
#endif

namespace torchium::optim::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

using cuda_kernels::BatchedProduct;
using cuda_kernels::ProductKind;
using cuda_kernels::SplitEntry;

bool is_single() {
  return linalg::detail::matmul_precision(std::nullopt) == linalg::detail::MatmulPrecision::kHigh;
}

// The parts of matrices [N, n, n], with zeros in the rows and columns from n to the pitch.
class SplitSquares {
 public:
  explicit SplitSquares(const at::Tensor& M)
      : N_(M.size(0)),
        n_(M.size(1)),
        pitch_(split_pitch(n_)),
        parts_(at::empty({is_single() ? 1 : 2, N_, pitch_, pitch_}, M.options().dtype(at::kHalf))),
        scales_(at::empty({N_}, M.options())) {
    at::Tensor source = M.contiguous();
    source = aligned_to_four(source) ? source : source.clone();
    const at::Tensor largest = at::linalg_vector_norm(
        source.flatten(1), std::numeric_limits<double>::infinity(), at::IntArrayRef{1});
    KernelTables<SplitEntry> tables;
    for (int64_t i = 0; i < N_; ++i) {
      tables.add({.x = source.const_data_ptr<float>() + i * n_ * n_,
                  .split = parts_of(i, /*has_scales=*/false),
                  .largest = reinterpret_cast<unsigned*>(floats(largest) + i),
                  .matrices = 1,
                  .first_tile = 0,
                  .type = cuda_kernels::ElementType::kFloat,
                  .order = n_ == pitch_ ? 0 : static_cast<int>(n_)},
                 static_cast<int>((pitch_ * pitch_ + cuda_kernels::kSplitTile - 1) /
                                  cuda_kernels::kSplitTile));
    }
    for (const auto& table : tables) {
      C10_CUDA_CHECK(cuda_kernels::split_fp16(table, c10::cuda::getCurrentCUDAStream()));
    }
  }

  at::Tensor times(const SplitSquares& other) const {
    const at::Tensor C = at::empty({N_, pitch_, pitch_}, scales_.options());
    multiply(ProductKind::kGeneral, {all(), other.all(), floats(C), N_}, nullptr);
    return without_padding(C);
  }

  at::Tensor gram(ProductKind kind) const {
    const at::Tensor C = at::zeros({N_, pitch_, pitch_}, scales_.options());
    at::Tensor alpha_and_beta = at::ones({2}, scales_.options());
    alpha_and_beta[1].zero_();
    multiply(kind, {all(), {}, floats(C), N_},
             reinterpret_cast<const cuda_kernels::GramUpdate*>(floats(alpha_and_beta)));
    return without_padding(C);
  }

 private:
  cuda_kernels::SplitFp16 parts_of(int64_t first, bool has_scales) const {
    auto* hi =
        reinterpret_cast<__half*>(parts_.mutable_data_ptr<at::Half>()) + first * pitch_ * pitch_;
    return {.hi = hi,
            .lo = parts_.size(0) == 1 ? nullptr : hi + N_ * pitch_ * pitch_,
            .scale = floats(scales_) + first,
            .rows = static_cast<int>(pitch_),
            .columns = static_cast<int>(pitch_),
            .has_scales = has_scales};
  }
  cuda_kernels::SplitFp16 all() const { return parts_of(0, /*has_scales=*/true); }

  void multiply(ProductKind kind, const BatchedProduct& product,
                const cuda_kernels::GramUpdate* update) const {
    const bool single = parts_.size(0) == 1;
    const auto done = cuda_kernels::work_of(kind, &product, 1, single);
    const torchium::detail::KernelWork work(done.flops, done.bytes);
    C10_CUDA_CHECK(cuda_kernels::batched_products(kind, &product, 1, update, single,
                                                  c10::cuda::getCurrentCUDAStream()));
  }

  at::Tensor without_padding(const at::Tensor& C) const {
    return n_ == pitch_ ? C : C.narrow(1, 0, n_).narrow(2, 0, n_).contiguous();
  }

  int64_t N_, n_, pitch_;
  at::Tensor parts_;   // [1 or 2, N, pitch, pitch]: hi, lo
  at::Tensor scales_;  // [N]
};

}  // namespace

bool has_square_products(const at::Tensor& M) {
  return M.is_cuda() && M.scalar_type() == at::kFloat && M.dim() == 3 && M.size(0) > 0 &&
         M.size(1) == M.size(2) &&
         has_split_products(split_pitch(M.size(1)), M.size(1));  // parts have the pitch in rows too
}

at::Tensor square_product(const at::Tensor& A, const at::Tensor& B) {
  return SplitSquares(A).times(SplitSquares(B));
}

at::Tensor square_gram(const at::Tensor& M, bool of_rows) {
  return SplitSquares(M).gram(of_rows ? ProductKind::kRowGram : ProductKind::kColumnGram);
}

at::Tensor square_congruence(const at::Tensor& M, const at::Tensor& S) {
  return square_product(M.mT(), square_product(S, M));
}

#else

bool has_square_products(const at::Tensor&) { return false; }
at::Tensor square_product(const at::Tensor&, const at::Tensor&) {
  TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}
at::Tensor square_gram(const at::Tensor&, bool) {
  TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}
at::Tensor square_congruence(const at::Tensor&, const at::Tensor&) {
  TORCH_INTERNAL_ASSERT(false, "this build has no CUDA kernels");
}
#endif

}  // namespace torchium::optim::detail
