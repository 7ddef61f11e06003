// Products of float64 matrices of the same shapes, again and again.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace torchium::linalg::detail {

// D = alpha A B + beta C for A [N, m, k], B [N, k, n], and C and D [N, m, n], contiguous float64,
// or A the transpose of such a tensor. D aliases none of the others. cuBLAS is asked once for its
// algorithm, and C is not copied to D first: with torch's operator, the host takes longer to launch
// products of a few hundred rows than the device to compute them.
class RepeatedProduct {
 public:
  // For operands like these.
  RepeatedProduct(const at::Tensor& A, const at::Tensor& B);
  ~RepeatedProduct();

  void run(at::Tensor& D, const at::Tensor& A, const at::Tensor& B, double alpha, double beta,
           const at::Tensor& C) const;
  // D = A B
  void run(at::Tensor& D, const at::Tensor& A, const at::Tensor& B) const;

 private:
  struct Plan;  // null on a CPU
  std::unique_ptr<Plan> plan_;
};

}  // namespace torchium::linalg::detail
