// The Gram matrix of rows of J that lie on several ranks.
#pragma once

#include "optim/natural_gradient/captured_batch.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchium::optim::detail {

// K = sum over the parameters p of weights[p] J_p J_p^T for the rows of all ranks (batch.shared):
// [n, n] float64, the same on all of them.
//
// Inner products need the rows of two ranks in one place. Parameters that share calls form a part,
// such as the weight and bias of a layer. Each part has an owner, to which all ranks send the
// inputs and output gradients of its calls, and not the far larger rows. The owner computes the
// part of the sum, and K is the sum over the ranks. At most `max_bytes` of calls reach a rank at a
// time, or those of one part.
at::Tensor shared_gram(at::TensorList params, const CapturedBatch& batch,
                       at::ArrayRef<double> weights, int64_t max_bytes);

}  // namespace torchium::optim::detail
