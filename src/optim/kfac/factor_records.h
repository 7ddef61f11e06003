// What K-FAC has seen of layers: the sums of their factors, as soon as the gradients are there.
#pragma once

#include "gradients/capture/layer_call.h"
#include "optim/kfac/kfac_factors.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace torchium::optim::detail {

// What the calls of a weight since the last step add up to (KfacLayer).
struct FactorSums {
  at::Tensor A;  // undefined: it has only been looked up
  at::Tensor G;
  // Of the weight as an embedding (gradients/factors/kronecker_factors.h); undefined: not looked
  // up.
  at::Tensor lookup_A;
  at::Tensor lookup_counts;
  // Of each backward pass; several products in one are of the same samples.
  std::map<int64_t, int64_t> samples_of_pass;
  int64_t rows = 0;

  int64_t samples() const;
};

// A layer as the first call of its weight has shown it.
struct FactorLayer {
  at::Tensor bias;  // shares the factors; undefined: none does
  int64_t groups = 1;
  bool is_transposed = false;  // the weight is [in, out]
  bool is_tied = false;        // the weight is looked up as an embedding too
  std::string problem;  // why the weight has no factors, as "used as [in, out] and as [out, in]"
};

// A weight, its factors in the state (undefined: none), and the largest order of one that is kept
// as a matrix.
struct FactorWeight {
  at::Tensor param;
  at::Tensor A, G;
  int64_t max_factor_size;
};

class FactorRecords {
 public:
  // A call with a gradient. Only kind, settings, micro-batch and tensors of `call` count; `layer`:
  // how it has used the weight. Neither a product nor a lookup: ignored.
  void record(const FactorWeight& weight, const gradients::detail::LayerCall& call,
              const FactorLayer& layer);
  // Known without a call.
  void declare(const at::Tensor& weight, FactorLayer layer);
  // Drops the sums of a weight that hold something of one of these backward passes; of any, if none
  // are given.
  void drop(const at::Tensor& weight, at::IntArrayRef passes = {});
  // Drops all sums.
  void forget();
  // Drops what is of none of these parameters.
  template <typename Known>
  void keep_only(Known&& is_known) {
    std::erase_if(layers_, [&](const auto& entry) { return !is_known(entry.first); });
    std::erase_if(sums_, [&](const auto& entry) { return !is_known(entry.first); });
    std::erase_if(untied_, [&](const auto* weight) { return !is_known(weight); });
  }

  // What the calls add up to, lookups included. Null: no product with the weight was seen.
  FactorSums* sums(const FactorWeight& weight);
  // Null: not known to be the weight of a linear layer or of a convolution.
  const FactorLayer* layer(const at::Tensor& weight) const;
  // Of the factors that there are, or that new ones would have.
  FactorLayout layout(const FactorWeight& weight, const FactorLayer& layer) const;
  // Whether the parameter has been looked up as an embedding, and was in no product.
  bool is_only_looked_up(const at::Tensor& param) const;
  // Whether the parameter is the bias of a layer.
  bool is_joint_bias(const at::Tensor& param) const;
  bool has_sums(const at::Tensor& weight) const {
    return sums_.count(weight.unsafeGetTensorImpl()) != 0;
  }

 private:
  void record_product(const FactorWeight& weight, const gradients::detail::LayerCall& call,
                      const FactorLayer& seen);
  void record_lookup(const FactorWeight& weight, const gradients::detail::LayerCall& call);

  std::unordered_map<const at::TensorImpl*, FactorLayer> layers_;
  std::unordered_map<const at::TensorImpl*, FactorSums> sums_;
  // Embeddings that were in no product for a step: their lookups are of no interest.
  std::unordered_set<const at::TensorImpl*> untied_;
};

}  // namespace torchium::optim::detail
