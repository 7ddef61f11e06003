// Householder tridiagonalisation of symmetric matrices of moderate order, each in the shared memory
// and registers of one cluster of thread blocks.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace torchium::cuda_kernels {

// A = Q T Q^T with T tridiagonal and Q = H_0 H_1 ... H_{n-3}, H_k = I - v_k v_k^T (Golub and Van
// Loan, Matrix Computations, 8.3.1). A vector v_k has the norm sqrt(2), or is zero where column k
// already has its form. All arrays are contiguous.
struct Tridiagonalise {
  const float* A;          // [count, n, n], finite and of a moderate scale
  float* reflectors;       // [count, reflector_rows, n]: row k < n - 1 is v_k, zero up to column k
  int64_t reflector_rows;  // at least n - 1; rows from n - 1 on are not written
  double* diagonal;        // [count, n]
  double* off_diagonal;    // [count, n]: entry k is T[k, k + 1]; the last one is not written
  int n;                   // 2 to kLargestTridiagonalised
  int64_t count;
};

// What fits into the registers and the shared memory of 16 processors of an H100.
constexpr int kLargestTridiagonalised = 1168;

// The largest order for which the current device, of compute capability major.minor and with
// `shared_bytes` of shared memory per block, runs clusters that are large enough; 0 if none.
int largest_tridiagonalised(int major, int minor, int shared_bytes);

cudaError_t tridiagonalise(const Tridiagonalise& arguments, cudaStream_t stream);

}  // namespace torchium::cuda_kernels
