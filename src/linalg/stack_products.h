// Products of stacks of float32 matrices on a GPU, in the precision that the caller names. CUDA
// builds only, but for matmul_precision.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torchium::linalg::detail {

// As in torch.set_float32_matmul_precision.
enum class MatmulPrecision {
  kHighest,  // float32, or operands of 22 bits each
  kHigh,     // operands of 11 bits each
};

// "highest" or "high"; none: what torch does at present.
MatmulPrecision matmul_precision(const std::optional<std::string>& name);

// Whether products of this many multiplications are faster with operands of halves
// (cuda_kernels/half_parts.h), for all that it takes to make them. Others are float32 or TF32.
bool use_halves(int64_t multiplications, MatmulPrecision precision);

// A contiguous stack [N, rows, columns]: floats in `high`, or halves with a common scale. `low` is
// what the halves in `high` lack, for kHighest; undefined: nothing.
struct StackOperand {
  at::Tensor high, low;
  at::Tensor scale;  // of halves: 0-dim float32
};

// Where the largest magnitude of a stack is.
enum class Largest { kAnywhere, kOnDiagonal };

// Of floats, or of bfloat16 whose largest is on the diagonal.
StackOperand operand_of_halves(const at::Tensor& stack, Largest where, MatmulPrecision precision);

// C <- beta C + alpha X X^T, X: [N, n, k], or alpha X^T X, X: [N, k, n], for a contiguous C [N, n,
// n]. coefficients: on the device, [2] alpha, beta, or for halves [4] alpha of hi hi, alpha of hi
// lo and lo hi, beta, 1; scales are theirs to undo.
void gram_update_(at::Tensor& C, const StackOperand& X, bool transposed,
                  const at::Tensor& coefficients, MatmulPrecision precision);

// out [N, m, n] <- A [N, m, k] B [N, k, n]; out is contiguous and neither of them.
void multiply_stacks_out(at::Tensor& out, const StackOperand& A, const StackOperand& B,
                         MatmulPrecision precision);

}  // namespace torchium::linalg::detail
