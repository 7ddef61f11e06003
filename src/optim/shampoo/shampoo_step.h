// Shampoo (Gupta, Koren, Singer 2018, arXiv 1802.09568; blocking and grafting: Anil et al. 2020,
// arXiv 2002.09018; Shi et al. 2023, arXiv 2309.06497) as stateless functions on tensors.
#pragma once

#include "optim/blocked/block_storage.h"
#include "optim/blocked/blocking.h"
#include "optim/core/step_plan.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// Names and defaults are those of ShampooOptions and of Python's torchium.Shampoo.
struct ShampooHyperparameters {
  at::Tensor lr;  // 0-dim; float64 on the CPU, or on the parameters' device
  double eps = 1e-4;
  int64_t update_freq = 100;
  double weight_decay = 0.0;
  double beta1 = 0.0;
  double beta2 = 1.0;
  double momentum = 0.0;
  bool nesterov = false;
  bool decoupled_weight_decay = false;
  double relative_eps = 0.0;
  int64_t block_size = 1024;
  bool merge_dims = true;
  std::optional<double> exponent;
  int64_t exponent_warmup = 0;                 // in steps; see root_exponent() in preconditioner.h
  std::string preconditioner_1d = "diagonal";  // or "full"
  bool preconditioned = true;
  std::optional<int64_t> max_preconditioned_dim = 16384;
  std::optional<std::string> grafting;  // "sgd", "adagrad", "rmsprop" or "adam"
  double grafting_eps = 1e-8;
  double grafting_beta2 = 0.999;  // resolved: never None here
  int64_t start_preconditioning_step = 1;
  std::string root_method = "auto";  // "auto", "eigh" or "newton"
  // Of the roots that are kept: "bfloat16"; none: the state dtype. A step goes by the tensors.
  std::optional<std::string> root_dtype = std::nullopt;
  // Of the products with gradients on a GPU: "highest" or "high"
  // (linalg/products/batched_products.h); none: as torch's own products.
  std::optional<std::string> matmul_precision;
  bool maximize = false;
  bool capturable = false;
};

// Whether grafting keeps a second moment of its own.
bool uses_second_moment(const ShampooHyperparameters& hyperparameters);

// State of the parameters of one call. The caller owns every tensor; a step changes them in place.
struct ShampooState {
  std::vector<at::Tensor> steps;       // 0-dim float64 on the parameter's device, one a parameter
  std::vector<at::Tensor> statistics;  // all slots of all parameters, in (param, slot) order
  std::vector<at::Tensor> roots;       // the same order; all of one dtype (see root_dtype)
  std::vector<at::Tensor> root_failures;  // the same order; int32 [count]
  std::vector<at::Tensor> diagonals;      // of those with ParameterRule::kDiagonal, in order
  std::vector<at::Tensor> exp_avgs;       // one a parameter if beta1 > 0, else empty
  std::vector<at::Tensor>
      grafting_second_moments;               // one a parameter unless grafting is None or "sgd"
  std::vector<at::Tensor> momentum_buffers;  // one a parameter if momentum > 0, else empty
  // Steps that each parameter had taken when its exp_avg, or its second moment, was made: 0-dim
  // float64, one a parameter. Empty: all were made before the first step.
  std::vector<at::Tensor> exp_avg_starts, second_moment_starts;
  at::Tensor status;  // int64 [kStatusSize], see step_status.h
};

class FusedStep;

// What steps of the same parameters with the same state share: blocks, batches and the tables of
// the kernels.
class ShampooStep : public PlannedStep {
 public:
  // Raises ValueError for state that does not fit. Keeps the tensors of `state`, which stay the
  // caller's.
  ShampooStep(ShampooHyperparameters hyperparameters, std::vector<at::Tensor> params,
              ShampooState state);
  ~ShampooStep() override;
  ShampooStep(const ShampooStep&) = delete;
  ShampooStep& operator=(const ShampooStep&) = delete;

  // Takes other hyper-parameters; false if these need another plan.
  bool adopt(const ShampooHyperparameters& hyperparameters);

  void run(const at::Tensor& lr, at::TensorList grads, at::IntArrayRef host_steps,
           const at::Tensor& found_inf) override;
  std::optional<int64_t> graph_key(at::IntArrayRef host_steps) const override;

 private:
  ShampooHyperparameters h_;
  std::vector<at::Tensor> params_;
  ShampooState state_;
  std::vector<Blocking> blockings_;
  std::vector<MatrixBatch> batches_;  // refer to blockings_
  std::unique_ptr<FusedStep> fused_;  // the kernels of a GPU; refers to all of these
};

// Zero statistics, identity roots and zero failure counts for `params`, stacked by block shape;
// parameters that no matrices precondition (optim/shampoo/shampoo_rules.h) have no slots.
BlockStorage shampoo_init_state(const ShampooHyperparameters& hyperparameters,
                                at::TensorList params);

// Renews all roots from the statistics, whatever the schedule says (capturable = true).
void shampoo_update_preconditioners(const ShampooHyperparameters& hyperparameters,
                                    at::TensorList params, ShampooState& state);

}  // namespace torchium::optim::detail
