#include "linalg/products/repeated_product.h"

#include <ATen/ATen.h>

#ifdef TORCHIUM_WITH_CUDA
#include "support/phase.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/Exceptions.h>
#include <c10/cuda/CUDAStream.h>

#include <cublasLt.h>
#endif

namespace torchium::linalg::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

constexpr size_t kProductWorkspaceBytes = size_t{4} << 20;

// Destroys a descriptor of cublasLt.
template <auto destroy>
struct Destroyer {
  template <typename T>
  void operator()(T* descriptor) const {
    destroy(descriptor);
  }
};
using Operation = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroyer<cublasLtMatmulDescDestroy>>;
using Layout =
    std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroyer<cublasLtMatrixLayoutDestroy>>;
using Preference =
    std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroyer<cublasLtMatmulPreferenceDestroy>>;

// cublasLt sees the transpose of a batch of matrices [N, rows, columns], in columns.
Layout layout_of(int64_t N, int64_t rows, int64_t columns) {
  cublasLtMatrixLayout_t layout = nullptr;
  TORCH_CUDABLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, CUDA_R_64F, columns, rows, columns));
  Layout owner(layout);
  const auto count = static_cast<int32_t>(N);
  const int64_t stride = rows * columns;
  TORCH_CUDABLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                        &count, sizeof(count)));
  TORCH_CUDABLAS_CHECK(cublasLtMatrixLayoutSetAttribute(
      layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof(stride)));
  return owner;
}

// Of D^T = B^T op(A^T).
Operation operation_of(bool is_transposed) {
  cublasLtMatmulDesc_t operation = nullptr;
  TORCH_CUDABLAS_CHECK(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_64F, CUDA_R_64F));
  Operation owner(operation);
  const cublasOperation_t of_A = is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  TORCH_CUDABLAS_CHECK(
      cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSB, &of_A, sizeof(of_A)));
  return owner;
}

}  // namespace

struct RepeatedProduct::Plan {
  Operation operation;
  Layout A, B, D;
  cublasLtMatmulAlgo_t algorithm;
  at::Tensor workspace;
  int64_t flops, bytes;

  Plan(const at::Tensor& a, const at::Tensor& b);
  void run(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double alpha, double beta,
           const at::Tensor& c) const;
  void choose_algorithm();
};

RepeatedProduct::Plan::Plan(const at::Tensor& a, const at::Tensor& b) {
  const int64_t N = a.size(0), m = a.size(1), k = a.size(2), n = b.size(2);
  const bool is_transposed = !a.is_contiguous();
  operation = operation_of(is_transposed);
  A = is_transposed ? layout_of(N, k, m) : layout_of(N, m, k);
  B = layout_of(N, k, n);
  D = layout_of(N, m, n);
  workspace =
      at::empty({static_cast<int64_t>(kProductWorkspaceBytes)}, a.options().dtype(at::kByte));
  flops = 2 * N * m * n * k;
  bytes = static_cast<int64_t>(sizeof(double)) * N * (m * k + k * n + m * n);
  choose_algorithm();
}

void RepeatedProduct::Plan::choose_algorithm() {
  cublasLtMatmulPreference_t preference = nullptr;
  TORCH_CUDABLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
  const Preference owner(preference);
  TORCH_CUDABLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(
      preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kProductWorkspaceBytes,
      sizeof(kProductWorkspaceBytes)));
  cublasLtMatmulHeuristicResult_t found;
  int count = 0;
  TORCH_CUDABLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(
      at::cuda::getCurrentCUDABlasLtHandle(), operation.get(), B.get(), A.get(), D.get(), D.get(),
      preference, /*requestedAlgoCount=*/1, &found, &count));
  TORCH_CHECK(count > 0, "cuBLAS has no algorithm for a product of float64 matrices.");
  algorithm = found.algo;
}

void RepeatedProduct::Plan::run(at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                                double alpha, double beta, const at::Tensor& c) const {
  const torchium::detail::KernelWork work(flops, bytes);
  TORCH_CUDABLAS_CHECK(cublasLtMatmul(
      at::cuda::getCurrentCUDABlasLtHandle(), operation.get(), &alpha, b.const_data_ptr(), B.get(),
      a.const_data_ptr(), A.get(), &beta, c.const_data_ptr(), D.get(), out.mutable_data_ptr(),
      D.get(), &algorithm, workspace.mutable_data_ptr(), kProductWorkspaceBytes,
      c10::cuda::getCurrentCUDAStream()));
}
#else
struct RepeatedProduct::Plan {};
#endif

RepeatedProduct::RepeatedProduct(const at::Tensor& A, const at::Tensor& B) {
#ifdef TORCHIUM_WITH_CUDA
  if (A.is_cuda()) plan_ = std::make_unique<Plan>(A, B);
#endif
}

RepeatedProduct::~RepeatedProduct() = default;

void RepeatedProduct::run(at::Tensor& D, const at::Tensor& A, const at::Tensor& B, double alpha,
                          double beta, const at::Tensor& C) const {
#ifdef TORCHIUM_WITH_CUDA
  if (plan_ != nullptr) {
    plan_->run(D, A, B, alpha, beta, C);
    return;
  }
#endif
  at::baddbmm_out(D, C, A, B, beta, alpha);
}

void RepeatedProduct::run(at::Tensor& D, const at::Tensor& A, const at::Tensor& B) const {
  run(D, A, B, /*alpha=*/1, /*beta=*/0, D);
}

}  // namespace torchium::linalg::detail
