// The Fisher matrix of a model, as an operator.
#pragma once

#include <torchium/export.h>
#include <torchium/linalg/linear_operator.h>

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace torchium::linalg {

struct SampleLosses {
  at::Tensor losses;   // [N]
  at::Tensor outputs;  // [N, ...], from which the losses are computed sample by sample; for "ggn"
};

// The Fisher matrix of N samples on the concatenated parameters. fisher:
//   "empirical"  F = (1/N) sum_n g_n g_n^T, g_n the gradient of the loss of sample n
//   "ggn"        F = (1/N) sum_n J_n^T H_n J_n, the generalised Gauss-Newton matrix: J_n is the
//                Jacobian of the outputs of sample n, H_n the Hessian of its loss with respect to
//                these. For cross-entropy and squared error it is the Fisher matrix (Martens 2020,
//                "New insights and perspectives on the natural gradient method", section 9).
// `loss_fn` is evaluated once, here. A product takes a derivative of J^T u with respect to u, which
// is J v, and a backward pass, each for all columns together, as hvp_operator(). No gradient of a
// sample is formed. The operator is declared positive semidefinite and keeps the graph of the
// losses: the parameters must not change in place before the last product.
//
// params: of one dtype, float32 or float64, on one device. c10::ValueError: no parameters, one
// that is there twice or does not require gradients, mixed dtypes or devices, another `fisher`, or
// losses and outputs of another shape, without a graph or independent of the parameters or of each
// other.
TORCHIUM_API LinearOperator fisher_operator(const std::function<SampleLosses()>& loss_fn,
                                            const std::vector<at::Tensor>& params,
                                            const std::string& fisher = "empirical");

}  // namespace torchium::linalg
