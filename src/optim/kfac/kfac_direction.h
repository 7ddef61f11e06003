// Multiplies a gradient by the damped inverse of its Kronecker factors.
#pragma once

#include "optim/kfac/kfac_layer.h"
#include "torchium/export.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::optim::detail {

// Gradient or direction of a layer in the state's dtype.
struct LayerTensors {
  at::Tensor weight;  // the weight's shape
  at::Tensor bias;    // [o]; undefined without a bias
};

// (G + sqrt(damping)/pi I)^-1 V (A + pi sqrt(damping) I)^-1 by the cached inverses, or, with
// kExact, Q_G ((Q_G^T V Q_A) / (lambda_G lambda_A^T + damping)) Q_A^T. EKFAC has its second moments
// instead of lambda_G lambda_A^T. V itself before the first inverse. Of layers with K and C:
// inverse_free_direction().
TORCHIUM_API LayerTensors kfac_direction(const KfacLayer& layer, DampingSplit split,
                                         const LayerTensors& V);

// The same for several layers. Those of one shape and damping are joined, which copies their roots
// and takes one launch where each layer would take one.
TORCHIUM_API std::vector<LayerTensors> kfac_directions(const std::vector<const KfacLayer*>& layers,
                                                       DampingSplit split,
                                                       const std::vector<LayerTensors>& V);

}  // namespace torchium::optim::detail
