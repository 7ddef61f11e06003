// Shampoo (Gupta, Koren, Singer 2018, arXiv 1802.09568; blocking and grafting: Anil et al. 2020,
// arXiv 2002.09018; Shi et al. 2023, arXiv 2309.06497) as stateless functions on tensors.
#pragma once

#include "optim/blocked/block_storage.h"
#include "optim/blocked/blocking.h"
#include "optim/core/parameter_state.h"
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

  // Weight decay that is added to the gradient.
  double l2_penalty() const { return decoupled_weight_decay ? 0.0 : weight_decay; }
};

// Whether grafting keeps a second moment of its own.
bool uses_second_moment(const ShampooHyperparameters& hyperparameters);

class ShampooSubset;
class StepPrologue;
struct ShampooGroup;

// What steps of the same parameters with the same state share. The parameters are parted between
// the kernels of a GPU, where these support them, and the operators of torch.
class ShampooStep : public PlannedStep {
 public:
  // One parameter at least, and a state for each. Raises ValueError for state that does not fit.
  // Keeps the tensors, which stay the caller's. status: see step_status.h.
  ShampooStep(ShampooHyperparameters hyperparameters, std::vector<at::Tensor> params,
              StateList states, at::Tensor status);
  ~ShampooStep() override;
  ShampooStep(const ShampooStep&) = delete;
  ShampooStep& operator=(const ShampooStep&) = delete;

  // Takes other hyper-parameters; false if these need another plan.
  bool adopt(const ShampooHyperparameters& hyperparameters);

  void begin(std::vector<at::Tensor> grads) override;
  void run(const at::Tensor& lr, at::IntArrayRef host_steps, const at::Tensor& found_inf) override;
  void end() override;
  std::optional<GraphKey> graph_key(at::IntArrayRef host_steps) const override;

 private:
  void part_parameters();
  bool roots_fit_graphs(int64_t t) const;

  ShampooHyperparameters h_;
  std::unique_ptr<ShampooGroup> group_;
  at::Tensor status_;
  std::unique_ptr<StepPrologue> prologue_;
  std::vector<MatrixBatch> batches_;  // of all subsets
  std::vector<std::unique_ptr<ShampooSubset>> subsets_;
  bool all_by_kernels_ = false;
};

// The blocks of a parameter; none where no matrices precondition it.
Blocking shampoo_blocking(const ShampooHyperparameters& hyperparameters, at::IntArrayRef shape);

// Zero statistics, identity roots and zero failure counts for `params`, stored by block shape;
// parameters that no matrices precondition (optim/shampoo_rules.h) have no slots.
BlockStorage shampoo_init_state(const ShampooHyperparameters& hyperparameters,
                                at::TensorList params);

// Renews all roots from the statistics, whatever the schedule says (capturable = true).
void shampoo_update_preconditioners(const ShampooHyperparameters& hyperparameters,
                                    const std::vector<at::Tensor>& params, const StateList& states,
                                    at::Tensor status);

}  // namespace torchium::optim::detail
