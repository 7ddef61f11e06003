// Adagrad (Duchi, Hazan, Singer 2011, JMLR 12), diagonal or with full matrices of blocks, as a
// libtorch optimizer.
#pragma once

#include "torchium/export.h"
#include "torchium/optim/blocked_optimizer.h"
#include "torchium/optim/options.h"

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torchium::optim {

/// Options of Adagrad; names and defaults are those of Python's `torchium.Adagrad`.
struct TORCHIUM_API AdagradOptions : public OptionsOf<AdagradOptions> {
  AdagradOptions(double lr = 0.01);
  /// Learning rate, >= 0.
  TORCH_ARG(double, lr) = 0.01;
  /// The rate of step t is lr / (1 + (t - 1) lr_decay); >= 0.
  TORCH_ARG(double, lr_decay) = 0.0;
  /// L2 penalty, >= 0.
  TORCH_ARG(double, weight_decay) = 0.0;
  /// First value of the accumulator (of its diagonal with full_matrix), >= 0.
  TORCH_ARG(double, initial_accumulator_value) = 0.0;
  /// Damping, >= 0: added to sqrt(sum), or to G with full_matrix. With full_matrix and update_freq
  /// above 1 a larger value is needed: the part of a gradient outside the span of the gradients in
  /// the last root is divided by sqrt(eps).
  TORCH_ARG(double, eps) = 1e-10;
  /// (G + eps I)^(-1/2) g on blocks of the flattened parameter instead of g / (sqrt(sum) + eps).
  TORCH_ARG(bool, full_matrix) = false;
  /// Elements per block with full_matrix, >= 1.
  TORCH_ARG(int64_t, block_size) = 128;
  /// Steps between two computations of the roots with full_matrix, >= 1.
  TORCH_ARG(int64_t, update_freq) = 1;
  /// Of the roots with full_matrix: "auto", "eigh" or "newton" (linalg/matrix_functions.h).
  TORCH_ARG(std::string, root_method) = "eigh";
  /// Ascend instead of descend.
  TORCH_ARG(bool, maximize) = false;
  /// Steps on a GPU are captured in CUDA graphs after some steps, and replayed: the same results
  /// with far less work for the host. "auto": where the memory that the graphs keep is at most 5 %
  /// of the state or 1 % of that of the device; "always"; "never". Steps with roots by eigenvalues
  /// are launched. Steps that a caller captures are not affected.
  TORCH_ARG(std::string, graphs) = "auto";
};
extern template struct OptionsOf<AdagradOptions>;

/// State of one parameter; it has matrices with full_matrix, else `sum`.
struct TORCHIUM_API AdagradParamState : public MatrixParamState {
  /// Sum of the squared gradients: the shape of the parameter, the state dtype.
  TORCH_ARG(at::Tensor, sum);

 public:
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
  std::vector<NamedTensor> parameter_shaped() override;

 protected:
  bool consists_of(const detail::ParameterState& tensors) const override;
};

/// Adagrad. The diagonal form equals `torch.optim.Adagrad` bit for bit on finite dense gradients.
class TORCHIUM_API Adagrad : public BlockedOptimizer {
 public:
  explicit Adagrad(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                   AdagradOptions defaults = {});
  explicit Adagrad(std::vector<at::Tensor> params, AdagradOptions defaults = {});

 protected:
  std::unique_ptr<SecondOrderParamState> make_empty_state() const override;
  c10::intrusive_ptr<detail::BlockedPlans> make_plans() const override;
  const char* name() const override { return "Adagrad"; }
};

}  // namespace torchium::optim
