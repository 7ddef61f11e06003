#include "linalg/stack_products.h"

#include <ATen/Context.h>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/half_parts.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/Exceptions.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAStream.h>

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

bool use_halves(int64_t multiplications, MatmulPrecision precision) {
  // About what float32 and TF32 do in the time of the passes that make halves.
  return multiplications >=
         (precision == MatmulPrecision::kHigh ? int64_t{1} << 31 : int64_t{1} << 29);
}

#ifdef TORCHIUM_WITH_CUDA
namespace {

// cuBLAS sees the transpose of a matrix, in columns.
struct Factor {
  const StackOperand& stack;
  cublasOperation_t operation;
};

// Pointers to coefficients, on the host or the device. Those for parts of halves may be null for
// floats.
struct Coefficients {
  cublasPointerMode_t mode;
  const float *alpha, *cross_alpha, *beta, *one;
};

cudaDataType_t data_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf ? CUDA_R_16F : CUDA_R_32F;
}

// C^T <- alpha op(A) op(B) + beta C^T.
void gemm_of_parts(cublasHandle_t handle, const float* alpha, const at::Tensor& A,
                   cublasOperation_t operation_of_A, const at::Tensor& B,
                   cublasOperation_t operation_of_B, const float* beta, at::Tensor& C,
                   cublasComputeType_t compute) {
  const auto as_int = [](int64_t size) { return static_cast<int>(size); };
  const int64_t k = A.size(operation_of_A == CUBLAS_OP_N ? -2 : -1);
  TORCH_CUDABLAS_CHECK(cublasGemmStridedBatchedEx(
      handle, operation_of_A, operation_of_B, as_int(C.size(-1)), as_int(C.size(-2)), as_int(k),
      alpha, A.const_data_ptr(), data_type(A), as_int(A.size(-1)), A.size(-1) * A.size(-2),
      B.const_data_ptr(), data_type(B), as_int(B.size(-1)), B.size(-1) * B.size(-2), beta,
      C.mutable_data_ptr(), CUDA_R_32F, as_int(C.size(-1)), C.size(-1) * C.size(-2),
      as_int(C.size(0)), compute, CUBLAS_GEMM_DEFAULT));
}

// The same with the products of all parts.
void gemm(const Coefficients& c, const Factor& A, const Factor& B, at::Tensor& C,
          MatmulPrecision precision) {
  if (C.numel() == 0) {
    return;
  }
  const at::NoTF32Guard as_asked;  // torch sets the mode of its handle by its own flags
  const bool tf32 = precision == MatmulPrecision::kHigh && A.stack.high.scalar_type() == at::kFloat;
  const auto compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  cublasHandle_t handle = at::cuda::getCurrentCUDABlasHandle();
  TORCH_CUDABLAS_CHECK(cublasSetPointerMode(handle, c.mode));
  const auto add = [&](const at::Tensor& a, const at::Tensor& b, const float* alpha,
                       const float* beta) {
    gemm_of_parts(handle, alpha, a, A.operation, b, B.operation, beta, C, compute);
  };
  add(A.stack.high, B.stack.high, c.alpha, c.beta);
  if (B.stack.low.defined()) {
    add(A.stack.high, B.stack.low, c.cross_alpha, c.one);
  }
  if (A.stack.low.defined()) {
    add(A.stack.low, B.stack.high, c.cross_alpha, c.one);
  }
  TORCH_CUDABLAS_CHECK(cublasSetPointerMode(handle, CUBLAS_POINTER_MODE_HOST));
}

Coefficients on_device(const at::Tensor& coefficients, bool of_halves) {
  const float* c = coefficients.const_data_ptr<float>();
  return of_halves ? Coefficients{CUBLAS_POINTER_MODE_DEVICE, c, c + 1, c + 2, c + 3}
                   : Coefficients{CUBLAS_POINTER_MODE_DEVICE, c, nullptr, c + 1, nullptr};
}

bool is_of_halves(const StackOperand& operand) { return operand.high.scalar_type() == at::kHalf; }

__half* halves(const at::Tensor& tensor) {
  return tensor.defined() ? reinterpret_cast<__half*>(tensor.mutable_data_ptr<at::Half>())
                          : nullptr;
}

}  // namespace

StackOperand operand_of_halves(const at::Tensor& stack, Largest where, MatmulPrecision precision) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  StackOperand operand{at::empty_like(stack, stack.options().dtype(at::kHalf)), {}, {}};
  const bool is_float = stack.scalar_type() == at::kFloat;
  if (precision == MatmulPrecision::kHighest && is_float) {  // 8 bits need no second half
    operand.low = at::empty_like(operand.high);
  }
  const at::Tensor numbers = at::empty({2}, stack.options().dtype(at::kFloat));
  auto* largest = reinterpret_cast<unsigned*>(numbers.mutable_data_ptr<float>());
  operand.scale = numbers.select(0, 1);
  const void* x = stack.const_data_ptr();
  const auto type =
      is_float ? cuda_kernels::ElementType::kFloat : cuda_kernels::ElementType::kBFloat16;
  C10_CUDA_CHECK(where == Largest::kOnDiagonal
                     ? cuda_kernels::find_largest_on_diagonals(x, type, stack.size(0),
                                                               stack.size(1), largest, stream)
                     : cuda_kernels::find_largest(stack.const_data_ptr<float>(), stack.numel(),
                                                  largest, stream));
  C10_CUDA_CHECK(cuda_kernels::split_halves(x, type, stack.numel(), largest, halves(operand.high),
                                            halves(operand.low),
                                            operand.scale.mutable_data_ptr<float>(), stream));
  return operand;
}

void gram_update_(at::Tensor& C, const StackOperand& X, bool transposed,
                  const at::Tensor& coefficients, MatmulPrecision precision) {
  const Factor first{X, transposed ? CUBLAS_OP_N : CUBLAS_OP_T};
  const Factor second{X, transposed ? CUBLAS_OP_T : CUBLAS_OP_N};
  gemm(on_device(coefficients, is_of_halves(X)), first, second, C, precision);
}

void multiply_stacks_out(at::Tensor& out, const StackOperand& A, const StackOperand& B,
                         MatmulPrecision precision) {
  const Factor first{B, CUBLAS_OP_N}, second{A, CUBLAS_OP_N};
  if (!is_of_halves(A)) {
    const float one = 1, zero = 0;
    gemm({CUBLAS_POINTER_MODE_HOST, &one, nullptr, &zero, nullptr}, first, second, out, precision);
    return;
  }
  const at::Tensor coefficients = at::empty({4}, out.options());
  C10_CUDA_CHECK(cuda_kernels::undo_scales(
      A.scale.const_data_ptr<float>(), B.scale.const_data_ptr<float>(),
      coefficients.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
  gemm(on_device(coefficients, true), first, second, out, precision);
}
#endif

}  // namespace torchium::linalg::detail
