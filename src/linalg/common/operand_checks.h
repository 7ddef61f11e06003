// Operand checks of the operators. Every error is a c10::ValueError that names the operator, the
// argument and its value. Usable on tensors with symbolic sizes.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <vector>

namespace torchium::linalg::detail {

struct Operand {
  const char* name;
  const at::Tensor& tensor;
};

// Dense float32, float64, bfloat16 or float16.
void check_floating(const char* op, const Operand& operand);

// check_floating; at least two dimensions; one dtype and one device for all.
void check_matrices(const char* op, std::initializer_list<Operand> operands);

// The last two dimensions are equal.
void check_square(const char* op, const Operand& operand);

// Not negative, and a finite number in the dtype that `operand` is computed in.
void check_damping(const char* op, double damping, const at::Tensor& operand);

// The broadcast of all dimensions, and of those before the last two.
std::vector<c10::SymInt> broadcast_shape(const char* op, std::initializer_list<Operand> operands);
std::vector<c10::SymInt> broadcast_batch(const char* op, std::initializer_list<Operand> operands);

// The dtype to compute in: float32 for bfloat16 and float16, else the operand's own.
at::ScalarType compute_dtype(const at::Tensor& operand);

}  // namespace torchium::linalg::detail
