// Operators that tell the memory of an optimizer: schemas and registration, no maths.

#include "optim/shampoo_memory.h"

#include <torch/library.h>

#include <optional>
#include <string>
#include <utility>

namespace torchium::ops {
namespace {

int64_t shampoo_step_temporaries(at::TensorList params, double weight_decay, double beta1,
                                 bool decoupled_weight_decay, int64_t block_size, bool merge_dims,
                                 std::string preconditioner_1d, std::optional<std::string> grafting,
                                 std::string root_method, bool maximize,
                                 std::optional<std::string> root_dtype) {
  optim::detail::ShampooHyperparameters h;
  h.weight_decay = weight_decay;
  h.beta1 = beta1;
  h.decoupled_weight_decay = decoupled_weight_decay;
  h.block_size = block_size;
  h.merge_dims = merge_dims;
  h.preconditioner_1d = std::move(preconditioner_1d);
  h.grafting = std::move(grafting);
  h.root_method = std::move(root_method);
  h.root_dtype = std::move(root_dtype);
  h.maximize = maximize;
  return optim::detail::shampoo_step_temporaries(h, params);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  m.def(
      "shampoo_step_temporaries(Tensor[] params, *, float weight_decay, float beta1, "
      "bool decoupled_weight_decay, int block_size, bool merge_dims, str preconditioner_1d, "
      "str? grafting, str root_method, bool maximize, str? root_dtype=None) -> int");
}

TORCH_LIBRARY_IMPL(torchium, CompositeExplicitAutograd, m) {
  m.impl("shampoo_step_temporaries", shampoo_step_temporaries);
}

}  // namespace torchium::ops
