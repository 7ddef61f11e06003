// The batch of the last refresh as a part of the state of parameters (NaturalGradientParamState).
#pragma once

#include "optim/capture/batch_capture.h"
#include "torchium/optim/natural_gradient.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// Null: the parameter has none.
using BatchStateOf = std::function<NaturalGradientParamState*(const at::Tensor&)>;

// `params` are those of all groups.
void clear_batch(const std::vector<at::Tensor>& params, const BatchStateOf& state_of);
// Copies the tensors of the batch into the state.
void write_batch(const KeptBatch& batch, const std::vector<at::Tensor>& params,
                 const BatchStateOf& state_of);
// The batch that write_batch() wrote, which shares its memory with the state; null: none.
std::shared_ptr<const KeptBatch> read_batch(const std::vector<at::Tensor>& params,
                                            const BatchStateOf& state_of);

// Copies the part of a batch in `loaded` to `fitted`, on the device of `param`. Throws
// c10::ValueError for uses that are not those of an optimizer with `param_count` parameters.
void fit_batch(const NaturalGradientParamState& loaded, NaturalGradientParamState& fitted,
               const at::Tensor& param, int64_t param_count, const std::string& name);

// Throws c10::ValueError, naming parameters, where layers of one backward pass disagree on the
// number of samples, or it looks as if an embedding has looked up positions for all samples at
// once.
void check_samples(const KeptBatch& batch,
                   const std::function<std::string(int64_t)>& name_of_param);

}  // namespace torchium::optim::detail
