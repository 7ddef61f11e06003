// The batch of a natural gradient step, and its storage in the state of parameters
// (NaturalGradientParamState).
#pragma once

#include "gradients/capture/layer_call.h"
#include "torchium/optim/natural_gradient.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// The sources of F = J^T J / n: layer calls, or rows that the caller has given.
struct KeptBatch {
  // In the order of their micro-batches, which count from 0. Weights and biases are positions in
  // the parameters of all groups. The output gradients are those of rows of J divided by rows().
  std::vector<gradients::detail::LayerCall> calls;
  at::Tensor loss_scale;          // what the loss was multiplied by; undefined: 1
  int64_t curvature_samples = 0;  // 0: calls are of gradients of the loss
  // Of the ranks that share the steps, the one whose samples they are.
  int64_t rank = 0, ranks = 1;

  std::vector<at::Tensor> given_rows;  // one per parameter of all groups; empty: there are calls
  at::Tensor residuals;                // of these rows

  bool is_empty() const { return calls.empty() && given_rows.empty(); }
  bool is_curvature() const { return curvature_samples > 0; }
  int64_t rows() const;
  int64_t samples() const;
};

// One per parameter of all groups.
using BatchStates = std::vector<NaturalGradientParamState*>;

// Multiplies the output gradients. In float32 where 16 bits may be too few.
void scale_gradients(KeptBatch& batch, double factor);
void clear_batch(NaturalGradientParamState& state);
// Copies the tensors of the batch into the state, without the scale of the loss, and into the
// memory of the batch before where the layouts are the same.
void write_batch(const KeptBatch& batch, const BatchStates& states);
// The batch that write_batch() wrote, which shares its memory with the state; null: none.
std::shared_ptr<const KeptBatch> read_batch(const BatchStates& states);

// Gives `fresh` room for the part of a batch in `saved`, on the device of `param`. Throws
// c10::ValueError for calls that are not those of an optimizer with `param_count` parameters.
void add_saved_room(NaturalGradientParamState& fresh, const NaturalGradientParamState& saved,
                    const at::Tensor& param, int64_t param_count, const std::string& name);

}  // namespace torchium::optim::detail
