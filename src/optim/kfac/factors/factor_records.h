// Sums of the Kronecker factors over captured calls.
#pragma once

#include "gradients/capture/layer_call.h"
#include "gradients/factors/eigenbasis_moments.h"
#include "gradients/factors/fisher_blocks.h"
#include "gradients/factors/kronecker_factors.h"
#include "optim/capture/loss_curvature.h"
#include "optim/kfac/factors/kfac_factors.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// Sums over the calls of a weight since the last step (KfacLayer).
struct FactorSums {
  struct Lookups {
    int64_t pass, samples, count;  // of one call: its rows of indices, and all of them
  };

  at::Tensor A;  // undefined: only lookups so far
  at::Tensor G;
  // Kept with the first sum G of a linear layer, because a later call may show that the weight is a
  // table.
  at::Tensor G_diagonal;
  bool is_of_table = false;  // G has the frequencies of the words
  // Of a table or a transposed convolution: G is of inputs.
  bool A_is_of_gradients = false;
  // Of lookups (gradients/factors/kronecker_factors.h); undefined: none.
  at::Tensor lookup_A;
  at::Tensor lookup_counts;
  std::vector<Lookups> lookups;
  // EKFAC: [groups, o, a], with those of lookups; undefined: none.
  at::Tensor moments;
  bool has_old_basis = false;  // some of the moments are in eigenvectors that were renewed since
  // Of a norm: [C, 2, 2], or [C, 1, 1] without a bias; undefined: of another layer.
  at::Tensor blocks;
  // By backward pass. Products of one pass have the same samples.
  std::map<int64_t, int64_t> samples_of_pass;
  int64_t rows = 0;  // vectors of inputs in the sum A, or of a transposed convolution in G
  // Samples of two calls of one pass, if they have differed: perhaps the batch went through the
  // model in parts, which count as positions of the same samples.
  std::optional<std::pair<int64_t, int64_t>> different_samples;
  // The number of ranks that the sums include, each with as many samples and rows as this one
  // (shared_sums.h).
  int64_t ranks = 1;
  bool is_joint = false;  // means over the samples of all ranks

  int64_t samples() const;
  // The sums of gradients and of their squares.
  std::vector<at::Tensor> of_gradients() const;
  // Counts the samples of a call, or of the curvature that the column belongs to.
  void count_samples(const gradients::detail::LayerCall& call, const CurvatureColumn* column);
};

// A layer, from the first call of its weight.
struct FactorLayer {
  at::Tensor bias;       // shares the factors; undefined: none does
  at::Tensor lone_bias;  // of a transposed convolution, whose A has no row for it
  int64_t groups = 1;
  bool is_transposed = false;              // the weight is [in, out]
  bool is_transposed_convolution = false;  // the weight is [in, out / groups, ...]
  bool is_tied = false;                    // the weight is an embedding table, perhaps too
  bool is_table = false;                   // it is that alone
  bool is_unitwise = false;                // the weight is the scale of a norm
  std::string problem;                     // why the weight has no factors; empty: it has
};

// A weight, its factors in the state (A and G, or K and C; undefined: none), the largest order of a
// factor that is stored as a matrix, how positions are summed, the structures of new factors, and
// the basis of its second moments (undefined: it has none).
struct FactorWeight {
  at::Tensor param;
  at::Tensor A, G;
  at::Tensor blocks;  // instead of both: of a norm
  int64_t max_factor_size;
  gradients::detail::WeightSharing sharing;
  FactorStructures structures = {};
  gradients::detail::Eigenbasis basis = {};
};

class FactorRecords {
 public:
  // A call with its gradient, of which kind, settings, micro-batch and tensors count. Calls that
  // are neither products nor lookups nor of norms are ignored. column: of a curvature, whose
  // gradient it is; null: it is that of the loss.
  void record(const FactorWeight& weight, const gradients::detail::LayerCall& call,
              const FactorLayer& layer, const CurvatureColumn* column = nullptr);
  // Declares a layer before its first call.
  void declare(const at::Tensor& weight, FactorLayer layer);
  // Drops the sums of a weight if they include one of these backward passes, or if none is given.
  void drop(const at::Tensor& weight, at::IntArrayRef passes = {});
  // Drops all sums.
  void forget();
  // Before eigenvectors are renewed between a call and its step.
  void note_new_bases();
  // Drops everything about other parameters.
  template <typename Known>
  void keep_only(Known&& is_known) {
    std::erase_if(layers_, [&](const auto& entry) { return !is_known(entry.first); });
    std::erase_if(sums_, [&](const auto& entry) { return !is_known(entry.first); });
  }

  // Makes the sums of tables that were in no product, once all calls of a step are recorded. A
  // table whose rows samples share, as positions [T] or [1, T] are, gets a problem instead.
  // is_shared: G has the counts of the words instead of their frequencies.
  void settle_tables(bool is_shared);
  // Null: nothing was recorded, or only lookups since settle_tables(). Lookups are included, but if
  // is_shared.
  FactorSums* sums(const FactorWeight& weight, bool is_shared);
  // Null: not known as the weight of a linear layer, a convolution or an embedding.
  const FactorLayer* layer(const at::Tensor& weight) const;
  // Of the existing factors, or of new ones.
  FactorLayout layout(const FactorWeight& weight, const FactorLayer& layer) const;
  // The weight of the layer with this bias; null: none.
  const at::TensorImpl* weight_beside(const at::Tensor& bias) const;
  // Whether the parameter is the bias of a transposed convolution.
  bool is_lone_bias(const at::Tensor& param) const;
  // Whether the parameter is the bias of a layer.
  bool is_joint_bias(const at::Tensor& param) const { return weight_beside(param) != nullptr; }
  bool has_sums(const at::Tensor& weight) const {
    return sums_.count(weight.unsafeGetTensorImpl()) != 0;
  }

 private:
  void record_product(const FactorWeight& weight, const gradients::detail::LayerCall& call,
                      const FactorLayer& seen, const CurvatureColumn* column);
  void record_lookup(const FactorWeight& weight, const gradients::detail::LayerCall& call,
                     const CurvatureColumn* column);
  void record_norm(const FactorWeight& weight, const gradients::detail::LayerCall& call,
                   const FactorLayer& seen, const CurvatureColumn* column);
  static void add_moments(const FactorWeight& weight, const gradients::detail::LayerCall& call,
                          at::IntArrayRef weight_shape, FactorSums& sums);

  std::unordered_map<const at::TensorImpl*, FactorLayer> layers_;
  std::unordered_map<const at::TensorImpl*, FactorSums> sums_;
};

}  // namespace torchium::optim::detail
