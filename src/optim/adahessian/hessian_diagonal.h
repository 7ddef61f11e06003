// The diagonal of the Hessian of a loss, from the graph of its gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchium::optim::detail {

// What an estimate needs of a parameter.
struct DiagonalRequest {
  at::Tensor param;
  at::Tensor gradient;  // with its graph, made by backward(create_graph=true)
  int64_t samples;      // random vectors
};

// Whether the gradient has no graph and is not zero: its diagonal of 0 makes a step of lr m / eps.
// Waits for the device.
bool lacks_curvature(const DiagonalRequest& request);

// Whether a gradient has a graph. c10::ValueError if none has, unless all are zero.
bool has_graphs(const std::vector<DiagonalRequest>& requests);

// |mean of z (H z)| over the samples of each parameter, with random signs z (Hutchinson's estimator
// of the diagonal: Bekas, Kokiopoulou, Saad 2007), averaged over all dimensions after the second:
// the kernel of a convolution (Yao et al. 2021, section 3.1). One tensor per request, of its
// parameter's shape, in the state's dtype; zeros for a gradient without a graph, which does not
// depend on the parameters. H is that of the requested parameters together. A backward pass through
// the gradients for each sample; frees their graph.
//
// The signs come from one seed of the default generator of the CPU, and are the same on every
// device. loss_scale: one number by which the loss was multiplied; undefined: 1. Throws
// c10::ValueError if no gradient has a graph, unless all are zero.
std::vector<at::Tensor> hessian_diagonals(const std::vector<DiagonalRequest>& requests,
                                          const at::Tensor& loss_scale);

}  // namespace torchium::optim::detail
