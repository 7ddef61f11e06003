// Operators of Shampoo and AdaGrad: schemas and registration, no maths. See optim/*_step.h.

#include "ops/in_place_fake.h"
#include "optim/adagrad/adagrad_step.h"
#include "optim/shampoo/shampoo_step.h"

#include <ATen/ATen.h>
#include <torch/library.h>

namespace torchium::ops {
namespace {

using optim::detail::AdagradHyperparameters;
using optim::detail::AdagradState;
using optim::detail::BlockStorage;
using optim::detail::ShampooHyperparameters;
using optim::detail::ShampooState;
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

void shampoo_step_(at::TensorList params, at::TensorList grads, at::TensorList steps,
                   at::TensorList statistics, at::TensorList roots, at::TensorList root_failures,
                   at::TensorList diagonals, at::TensorList exp_avgs,
                   at::TensorList grafting_second_moments, at::TensorList momentum_buffers,
                   at::TensorList exp_avg_starts, at::TensorList second_moment_starts,
                   at::Tensor status, const at::Tensor& lr, double eps, int64_t update_freq,
                   double weight_decay, double beta1, double beta2, double momentum, bool nesterov,
                   bool decoupled_weight_decay, double relative_eps, int64_t block_size,
                   bool merge_dims, std::optional<double> exponent, std::string preconditioner_1d,
                   std::optional<std::string> grafting, double grafting_eps, double grafting_beta2,
                   int64_t start_preconditioning_step, std::string root_method, bool maximize,
                   bool capturable, at::IntArrayRef host_steps,
                   std::optional<std::string> matmul_precision, bool preconditioned,
                   std::optional<int64_t> max_preconditioned_dim, int64_t exponent_warmup) {
  const ShampooHyperparameters h{.lr = lr,
                                 .eps = eps,
                                 .update_freq = update_freq,
                                 .weight_decay = weight_decay,
                                 .beta1 = beta1,
                                 .beta2 = beta2,
                                 .momentum = momentum,
                                 .nesterov = nesterov,
                                 .decoupled_weight_decay = decoupled_weight_decay,
                                 .relative_eps = relative_eps,
                                 .block_size = block_size,
                                 .merge_dims = merge_dims,
                                 .exponent = exponent,
                                 .exponent_warmup = exponent_warmup,
                                 .preconditioner_1d = std::move(preconditioner_1d),
                                 .preconditioned = preconditioned,
                                 .max_preconditioned_dim = max_preconditioned_dim,
                                 .grafting = std::move(grafting),
                                 .grafting_eps = grafting_eps,
                                 .grafting_beta2 = grafting_beta2,
                                 .start_preconditioning_step = start_preconditioning_step,
                                 .root_method = std::move(root_method),
                                 .matmul_precision = std::move(matmul_precision),
                                 .maximize = maximize,
                                 .capturable = capturable};
  ShampooState state{.steps = steps.vec(),
                     .statistics = statistics.vec(),
                     .roots = roots.vec(),
                     .root_failures = root_failures.vec(),
                     .diagonals = diagonals.vec(),
                     .exp_avgs = exp_avgs.vec(),
                     .grafting_second_moments = grafting_second_moments.vec(),
                     .momentum_buffers = momentum_buffers.vec(),
                     .exp_avg_starts = exp_avg_starts.vec(),
                     .second_moment_starts = second_moment_starts.vec(),
                     .status = std::move(status)};
  optim::detail::ShampooStep(h, params.vec(), std::move(state)).run(lr, grads, host_steps, {});
}

void shampoo_update_preconditioners_(at::TensorList params, at::TensorList steps,
                                     at::TensorList statistics, at::TensorList roots,
                                     at::TensorList root_failures, at::Tensor status, double eps,
                                     double beta2, double relative_eps, int64_t block_size,
                                     bool merge_dims, std::optional<double> exponent,
                                     std::string preconditioner_1d, std::string root_method,
                                     bool preconditioned,
                                     std::optional<int64_t> max_preconditioned_dim) {
  ShampooHyperparameters h;
  h.eps = eps;
  h.beta2 = beta2;
  h.relative_eps = relative_eps;
  h.block_size = block_size;
  h.merge_dims = merge_dims;
  h.exponent = exponent;
  h.preconditioner_1d = std::move(preconditioner_1d);
  h.preconditioned = preconditioned;
  h.max_preconditioned_dim = max_preconditioned_dim;
  h.root_method = std::move(root_method);
  ShampooState state;
  state.steps = steps.vec();
  state.statistics = statistics.vec();
  state.roots = roots.vec();
  state.root_failures = root_failures.vec();
  state.status = std::move(status);
  optim::detail::shampoo_update_preconditioners(h, params, state);
}

StorageTuple adagrad_init_state(at::TensorList params, int64_t block_size,
                                double initial_accumulator_value) {
  return flatten(optim::detail::adagrad_init_state(params, block_size, initial_accumulator_value));
}

void adagrad_step_(at::TensorList params, at::TensorList grads, at::TensorList steps,
                   at::TensorList sums, at::TensorList statistics, at::TensorList roots,
                   at::TensorList root_failures, at::Tensor status, const at::Tensor& lr,
                   double lr_decay, double weight_decay, double eps, bool full_matrix,
                   int64_t block_size, int64_t update_freq, bool maximize,
                   at::IntArrayRef host_steps, std::string root_method) {
  const AdagradHyperparameters h{.lr_decay = lr_decay,
                                 .weight_decay = weight_decay,
                                 .eps = eps,
                                 .full_matrix = full_matrix,
                                 .block_size = block_size,
                                 .update_freq = update_freq,
                                 .root_method = std::move(root_method),
                                 .maximize = maximize};
  AdagradState state{.steps = steps.vec(),
                     .sums = sums.vec(),
                     .statistics = statistics.vec(),
                     .roots = roots.vec(),
                     .root_failures = root_failures.vec(),
                     .status = std::move(status)};
  optim::detail::AdagradStep(h, params.vec(), std::move(state)).run(lr, grads, host_steps, {});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchium, m) {
  m.def(
      "shampoo_init_state(Tensor[] params, *, int block_size, bool merge_dims, "
      "str preconditioner_1d, str? root_dtype=None, bool preconditioned=True, "
      "int? max_preconditioned_dim=None) -> (Tensor[] statistics, Tensor[] roots, "
      "Tensor[] root_failures, int[] layout)");
  m.def(
      "shampoo_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] steps, "
      "Tensor(c!)[] statistics, Tensor(d!)[] roots, Tensor(e!)[] root_failures, "
      "Tensor(f!)[] diagonals, Tensor(g!)[] exp_avgs, Tensor(h!)[] grafting_second_moments, "
      "Tensor(i!)[] momentum_buffers, Tensor[] exp_avg_starts, Tensor[] second_moment_starts, "
      "Tensor(j!) status, *, Tensor lr, float eps, "
      "int update_freq, float weight_decay, float beta1, float beta2, float momentum, "
      "bool nesterov, bool decoupled_weight_decay, float relative_eps, int block_size, "
      "bool merge_dims, float? exponent, str preconditioner_1d, str? grafting, "
      "float grafting_eps, float grafting_beta2, int start_preconditioning_step, "
      "str root_method, bool maximize, bool capturable, int[] host_steps, "
      "str? matmul_precision=None, bool preconditioned=True, int? max_preconditioned_dim=None, "
      "int exponent_warmup=0) -> ()");
  m.def(
      "shampoo_update_preconditioners_(Tensor[] params, Tensor[] steps, "
      "Tensor(a!)[] statistics, Tensor(b!)[] roots, Tensor(c!)[] root_failures, "
      "Tensor(d!) status, *, float eps, float beta2, float relative_eps, int block_size, "
      "bool merge_dims, float? exponent, str preconditioner_1d, str root_method, "
      "bool preconditioned=True, int? max_preconditioned_dim=None) -> ()");
  m.def(
      "adagrad_init_state(Tensor[] params, *, int block_size, float initial_accumulator_value) "
      "-> (Tensor[] statistics, Tensor[] roots, Tensor[] root_failures, int[] layout)");
  m.def(
      "adagrad_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] steps, Tensor(c!)[] sums, "
      "Tensor(d!)[] statistics, Tensor(e!)[] roots, Tensor(f!)[] root_failures, "
      "Tensor(g!) status, *, Tensor lr, float lr_decay, float weight_decay, float eps, "
      "bool full_matrix, int block_size, int update_freq, bool maximize, int[] host_steps, "
      "str root_method=\"eigh\") -> ()");
}

TORCH_LIBRARY_IMPL(torchium, CompositeExplicitAutograd, m) {
  m.impl("shampoo_init_state", shampoo_init_state);
  m.impl("shampoo_step_", shampoo_step_);
  m.impl("shampoo_update_preconditioners_", shampoo_update_preconditioners_);
  m.impl("adagrad_init_state", adagrad_init_state);
  m.impl("adagrad_step_", adagrad_step_);
}

TORCH_LIBRARY_IMPL(torchium, Meta, m) {
  m.impl("shampoo_step_", InPlaceFake<&shampoo_step_>::call);
  m.impl("shampoo_update_preconditioners_", InPlaceFake<&shampoo_update_preconditioners_>::call);
  m.impl("adagrad_step_", InPlaceFake<&adagrad_step_>::call);
}

}  // namespace torchium::ops
