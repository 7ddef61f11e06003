// The initial state of Shampoo and Adagrad: schemas and registration, no maths.

#include "optim/adagrad/adagrad_step.h"
#include "optim/shampoo/shampoo_step.h"

#include <ATen/ATen.h>
#include <torch/library.h>

namespace torchium::ops {
namespace {

using optim::detail::BlockStorage;
using optim::detail::ShampooHyperparameters;
using StorageTuple = std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>,
                                std::vector<at::Tensor>, std::vector<int64_t>>;

StorageTuple flatten(BlockStorage storage) {
  std::vector<int64_t> layout;
  layout.reserve(5 * storage.layout.size());
  for (const auto& row : storage.layout) {
    layout.insert(layout.end(), {row.param, row.slot, row.buffer, row.start, row.count});
  }
  return {std::move(storage.statistics), std::move(storage.roots), std::move(storage.root_failures),
          std::move(layout)};
}

StorageTuple shampoo_init_state(at::TensorList params, int64_t block_size, bool merge_dims,
                                std::string preconditioner_1d,
                                std::optional<std::string> root_dtype, bool preconditioned,
                                std::optional<int64_t> max_preconditioned_dim) {
  ShampooHyperparameters h;
  h.block_size = block_size;
  h.merge_dims = merge_dims;
  h.preconditioner_1d = std::move(preconditioner_1d);
  h.preconditioned = preconditioned;
  h.max_preconditioned_dim = max_preconditioned_dim;
  h.root_dtype = std::move(root_dtype);
  return flatten(optim::detail::shampoo_init_state(h, params));
}

StorageTuple adagrad_init_state(at::TensorList params, int64_t block_size,
                                double initial_accumulator_value) {
  return flatten(optim::detail::adagrad_init_state(params, block_size, initial_accumulator_value));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  m.def(
      "shampoo_init_state(Tensor[] params, *, int block_size, bool merge_dims, "
      "str preconditioner_1d, str? root_dtype=None, bool preconditioned=True, "
      "int? max_preconditioned_dim=None) -> (Tensor[] statistics, Tensor[] roots, "
      "Tensor[] root_failures, int[] layout)");
  m.def(
      "adagrad_init_state(Tensor[] params, *, int block_size, float initial_accumulator_value) "
      "-> (Tensor[] statistics, Tensor[] roots, Tensor[] root_failures, int[] layout)");
}

TORCH_LIBRARY_IMPL(torchium, CompositeExplicitAutograd, m) {
  m.impl("shampoo_init_state", shampoo_init_state);
  m.impl("adagrad_init_state", adagrad_init_state);
}

}  // namespace torchium::ops
