// K-FAC (Martens and Grosse 2015, arXiv 1503.05671; convolutions: Grosse and Martens 2016, arXiv
// 1602.01407; several positions: "expand" of Eschenhagen et al. 2023, arXiv 2311.00636) with the
// empirical Fisher, as stateless functions on tensors.
#pragma once

#include "optim/kfac/kfac_layer.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// Options of one parameter. Names are those of KFACOptions and of Python's torchium.KFAC.
struct KfacParameterOptions {
  at::Tensor lr;  // 0-dim; float64 on the CPU, or on the parameters' device
  double momentum = 0.9;
  double weight_decay = 0.0;
  bool maximize = false;
};

// Options of the whole step.
struct KfacHyperparameters {
  std::vector<KfacParameterOptions> parameters;  // one per parameter
  bool batch_averaged = true;                    // the loss is a mean over the samples
  std::optional<double> kl_clip = 1e-3;
  DampingSplit damping_split = DampingSplit::kPi;
  std::string root_method = "auto";  // "auto", "eigh" or "newton" (not with kExact)
  at::Tensor found_inf;  // one number, not 0: skip the step (found_inf_guard.h); undefined: 0
};

struct KfacState {
  std::vector<at::Tensor> steps;             // 0-dim float64 on the parameter's device
  std::vector<at::Tensor> momentum_buffers;  // one per parameter; used if momentum > 0
  at::Tensor status;                         // int64 [kStatusSize], see step_status.h
};

// One step of all parameters of an optimizer on one device. `params` and `grads` have the same
// length and no undefined gradient. Parameters without a layer take a step of SGD with momentum.
void kfac_step(const KfacHyperparameters& hyperparameters, at::TensorList params,
               at::TensorList grads, std::vector<KfacLayer>& layers, KfacState& state);

}  // namespace torchium::optim::detail
