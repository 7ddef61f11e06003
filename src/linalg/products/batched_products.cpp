#include "linalg/products/batched_products.h"

#include <ATen/Context.h>

#ifdef TORCHIUM_WITH_CUDA
#include "support/phase.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/Exceptions.h>

#include <cublas_v2.h>
#endif

namespace torchium::linalg::detail {

MatmulPrecision matmul_precision(const std::optional<std::string>& name) {
  if (name.has_value()) {
    return *name == "high" ? MatmulPrecision::kHigh : MatmulPrecision::kHighest;
  }
  const auto precision =
      at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  return precision == at::Float32Precision::TF32 ? MatmulPrecision::kHigh
                                                 : MatmulPrecision::kHighest;
}

#ifdef TORCHIUM_WITH_CUDA
namespace {

// cuBLAS sees the transpose of a matrix, in columns.
struct GemmOperand {
  const at::Tensor& matrices;
  cublasOperation_t operation;
};

cublasComputeType_t compute_type(MatmulPrecision precision) {
  return precision == MatmulPrecision::kHigh ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

// Of `count` products [m, k] by [k, n].
torchium::detail::KernelWork announced(int64_t count, int64_t m, int64_t n, int64_t k,
                                       int64_t element_bytes = sizeof(float)) {
  return {2 * count * m * n * k, element_bytes * count * (m * k + k * n + m * n)};
}

int as_int(int64_t size) { return static_cast<int>(size); }

// Sets where cuBLAS reads alpha and beta. torch expects the host, also after an error.
class PointerMode {
 public:
  PointerMode(cublasHandle_t handle, cublasPointerMode_t mode) : handle_(handle) {
    TORCH_CUDABLAS_CHECK(cublasSetPointerMode(handle, mode));
  }
  ~PointerMode() { cublasSetPointerMode(handle_, CUBLAS_POINTER_MODE_HOST); }
  PointerMode(const PointerMode&) = delete;
  PointerMode& operator=(const PointerMode&) = delete;

 private:
  cublasHandle_t handle_;
};

// C^T <- alpha op(A) op(B) + beta C^T; alpha and beta are on the host or the device.
void gemm(cublasPointerMode_t mode, const float* alpha, const GemmOperand& A, const GemmOperand& B,
          const float* beta, at::Tensor& C, MatmulPrecision precision) {
  if (C.numel() == 0) {
    return;
  }
  const at::NoTF32Guard as_asked;  // torch sets the math mode of its handle from its own flags
  const auto size_of_matrix = [](const at::Tensor& x) { return x.size(-1) * x.size(-2); };
  const at::Tensor &a = A.matrices, &b = B.matrices;
  const int64_t k = a.size(A.operation == CUBLAS_OP_N ? -2 : -1);
  cublasHandle_t handle = at::cuda::getCurrentCUDABlasHandle();
  const PointerMode pointer_mode(handle, mode);
  const auto work = announced(C.size(0), C.size(-2), C.size(-1), k);
  TORCH_CUDABLAS_CHECK(cublasGemmStridedBatchedEx(
      handle, A.operation, B.operation, as_int(C.size(-1)), as_int(C.size(-2)), as_int(k), alpha,
      a.const_data_ptr(), CUDA_R_32F, as_int(a.size(-1)), size_of_matrix(a), b.const_data_ptr(),
      CUDA_R_32F, as_int(b.size(-1)), size_of_matrix(b), beta, C.mutable_data_ptr(), CUDA_R_32F,
      as_int(C.size(-1)), size_of_matrix(C), as_int(C.size(0)), compute_type(precision),
      CUBLAS_GEMM_DEFAULT));
}

}  // namespace

void gram_update_(at::Tensor& C, const at::Tensor& X, bool transposed, const float* alpha,
                  const float* beta, MatmulPrecision precision) {
  const GemmOperand first{X, transposed ? CUBLAS_OP_N : CUBLAS_OP_T};
  const GemmOperand second{X, transposed ? CUBLAS_OP_T : CUBLAS_OP_N};
  gemm(CUBLAS_POINTER_MODE_DEVICE, alpha, first, second, beta, C, precision);
}

void multiply_batches_out(at::Tensor& out, const at::Tensor& A, const at::Tensor& B,
                          MatmulPrecision precision) {
  const float one = 1, zero = 0;
  gemm(CUBLAS_POINTER_MODE_HOST, &one, {B, CUBLAS_OP_N}, {A, CUBLAS_OP_N}, &zero, out, precision);
}

void multiply_strided_out(at::Tensor& out, const at::Tensor& A, const at::Tensor& B,
                          MatmulPrecision precision, ProductScale scale) {
  const at::NoTF32Guard as_asked;
  const bool is_double = out.scalar_type() == at::kDouble;
  const float alpha = static_cast<float>(scale.alpha), beta = static_cast<float>(scale.beta);
  const auto scalar = [&](const double& exact, const float& rounded) -> const void* {
    return is_double ? static_cast<const void*>(&exact) : &rounded;
  };
  const cudaDataType type = is_double ? CUDA_R_64F : CUDA_R_32F;
  const auto has_rows = [](const at::Tensor& x) {
    return x.stride(2) == 1 && (x.size(1) == 1 || x.stride(1) >= x.size(2));
  };
  const auto operation = [&](const at::Tensor& x) {
    return has_rows(x) ? CUBLAS_OP_N : CUBLAS_OP_T;
  };
  // The strides of dimensions with one element mean nothing.
  const auto leading = [&](const at::Tensor& x) {
    return has_rows(x) ? as_int(x.size(1) == 1 ? x.size(2) : x.stride(1))
                       : as_int(x.size(2) == 1 ? x.size(1) : x.stride(2));
  };
  const auto work = announced(out.size(0), out.size(1), out.size(2), A.size(2), out.element_size());
  // cuBLAS sees the transpose of each matrix: C^T = B^T A^T.
  TORCH_CUDABLAS_CHECK(cublasGemmStridedBatchedEx(
      at::cuda::getCurrentCUDABlasHandle(), operation(B), operation(A), as_int(out.size(2)),
      as_int(out.size(1)), as_int(A.size(2)), scalar(scale.alpha, alpha), B.const_data_ptr(), type,
      leading(B), B.stride(0), A.const_data_ptr(), type, leading(A), A.stride(0),
      scalar(scale.beta, beta), out.mutable_data_ptr(), type, leading(out), out.stride(0),
      as_int(out.size(0)), is_double ? CUBLAS_COMPUTE_64F : compute_type(precision),
      CUBLAS_GEMM_DEFAULT));
}

void multiply_at_addresses(float* const* C, const MatrixAddresses& A, const MatrixAddresses& B,
                           int64_t m, int64_t n, int64_t k, int64_t count,
                           MatmulPrecision precision) {
  const at::NoTF32Guard as_asked;
  const float one = 1, zero = 0;
  const auto operation = [](const MatrixAddresses& x) {
    return x.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  };
  const auto untyped = [](float* const* matrices) {
    return reinterpret_cast<const void* const*>(matrices);
  };
  const auto work = announced(count, m, n, k);
  // cuBLAS sees the transpose of each matrix: C^T = op(B)^T op(A)^T.
  TORCH_CUDABLAS_CHECK(cublasGemmBatchedEx(
      at::cuda::getCurrentCUDABlasHandle(), operation(B), operation(A), as_int(n), as_int(m),
      as_int(k), &one, untyped(B.matrices), CUDA_R_32F, as_int(B.transposed ? k : n),
      untyped(A.matrices), CUDA_R_32F, as_int(A.transposed ? m : k), &zero,
      reinterpret_cast<void* const*>(C), CUDA_R_32F, as_int(n), as_int(count),
      compute_type(precision), CUBLAS_GEMM_DEFAULT));
}
#endif

}  // namespace torchium::linalg::detail
