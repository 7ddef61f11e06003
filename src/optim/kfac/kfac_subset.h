// The parameters of a step of K-FAC, and its stages for a subset of them: by PyTorch operators or
// by CUDA kernels.
#pragma once

#include "optim/core/graph_inputs.h"
#include "optim/core/parameter_state.h"
#include "optim/core/step_prologue.h"
#include "optim/kfac/kfac_layer.h"
#include "optim/kfac/sharing/layer_exchange.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// Options of one parameter. Names are those of KFACOptions and of Python's torchium.KFAC.
struct KfacParameterOptions {
  at::Tensor lr;  // of this step: 0-dim; float64 on the CPU, or on the parameters' device
  double momentum = 0.9;
  double weight_decay = 0.0;
  bool maximize = false;
};

// Options of the whole step.
struct KfacSharedOptions {
  std::optional<double> kl_clip = 1e-3;
  DampingSplit damping_split = DampingSplit::kPi;
  std::string solver = "auto";  // of KFACOptions
  // The step ends with .grad <- nu d for the parameters of layers; nothing else moves.
  bool writes_gradients = false;
  bool keeps_prediction = false;  // KfacStep::take_prediction()
  bool capturable = false;        // by the caller
};

// All lists but `layers` have one entry per parameter. The weight of a transposed layer and its
// momentum buffer are views [out, in].
struct KfacGroup {
  std::vector<at::Tensor> params;
  StateList states;  // momentum_buffer: undefined without momentum
  std::vector<KfacParameterOptions> options;
  KfacSharedOptions shared;
  std::vector<KfacLayer> layers;
  std::vector<UnitwiseLayer> unitwise;
  // With the ranks that share the step; null: none do.
  std::shared_ptr<LayerExchange> exchange;
};

struct KfacRun {
  at::TensorList grads;  // of all parameters of the group
  const StepPrologue& prologue;
};

// The inverses of all subsets are renewed together, elsewhere.
class KfacSubset {
 public:
  virtual ~KfacSubset() = default;

  // Of layers with sums: k <- k + 1; A <- d A + (1 - d) E[a a^T], G <- d G + (1 - d) E[g g^T] with
  // d = min(1 - 1/k, stat_decay). Not those of solver "inverse_free", which has no A and G.
  virtual void update_factors(const KfacRun& run) = 0;
  // V = g + weight_decay p; d = (G + ..I)^-1 V (A + ..I)^-1, or C C^T V K K^T, of layers, else d =
  // V. Of layers that other ranks precondition d has no value yet.
  virtual void precondition(const KfacRun& run) = 0;
  // Between precondition() and end(): d of the weight and the bias of a layer of this subset, by
  // its position in the group, to be read or to be filled: [o, c] or [o, c, ...], and [o].
  virtual std::vector<at::Tensor> directions(size_t layer) const = 0;
  // Terms of sum lr^2 V . d over the parameters of layers: float64 [any]; undefined: none.
  virtual at::Tensor kl_terms(const KfacRun& run) = 0;
  // buf <- momentum buf + nu d; p <- p - lr buf. nu: for parameters of layers. With
  // writes_gradients instead .grad <- nu d.
  virtual void apply(const KfacRun& run, const StepScalar& nu) = 0;
  // Adds what the launches of a step without new factors and inverses depend on besides the
  // options. False: the next one launches what later ones do not, or what a CUDA graph cannot hold.
  virtual bool add_to(GraphKey&) const { return false; }
  // Frees the memory of the step.
  virtual void end() = 0;
  // What stays after it; undefined: nothing.
  virtual at::Tensor kept() const { return {}; }
};

// Some parameters, layers and unit-wise layers of a group, by their positions in it. Weight and
// bias of a layer are in the same subset.
struct KfacMembers {
  std::vector<size_t> params, layers, norms;
};

// These unit-wise layers of the group, which must outlive the subset, by PyTorch operators for all
// of them together.
std::unique_ptr<KfacSubset> make_unitwise_subset(const KfacGroup& group, std::vector<size_t> norms);

// By PyTorch operators, on any device. The group must outlive the subset.
std::unique_ptr<KfacSubset> make_eager_subset(const KfacGroup& group, KfacMembers members);

}  // namespace torchium::optim::detail
