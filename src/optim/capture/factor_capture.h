// What a K-FAC optimizer captures: the sums of its factors, as soon as the gradients are there.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace torchium::gradients::detail {
class OperatorCapture;
}

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
  at::Tensor bias;            // shares the factors; undefined: none does
  bool has_bias_row = false;  // A has a row for a bias
  int64_t groups = 1;
  bool is_transposed = false;  // the weight is [in, out]
  bool is_new = false;         // seen since the last step for the first time
  bool diagonal_A = false;     // only the diagonal of a factor is kept
  bool diagonal_G = false;
  std::string problem;  // why the weight has no factors, as "used as [in, out] and as [out, in]"

  // The weight as [out, ...].
  at::Tensor matrix(const at::Tensor& weight) const;
};

class FactorCapture {
 public:
  FactorCapture();
  ~FactorCapture();

  // Watches these parameters, and no others from now on.
  void watch(const std::vector<at::Tensor>& params);
  // Whether the factors of a weight are due, and the largest order of one that is kept as a matrix;
  // one entry a watched parameter.
  void set_due(const std::vector<bool>& due, const std::vector<int64_t>& max_factor_sizes);

  // What the calls of a weight add up to; lookups are included. Null: its factors were not due, or
  // no product with it was seen.
  FactorSums* sums(const at::Tensor& weight) const;
  // Null: not known to be the weight of a linear layer or of a convolution.
  const FactorLayer* layer(const at::Tensor& weight) const;
  // Whether the parameter has been looked up as an embedding, and was in no product.
  bool is_only_looked_up(const at::Tensor& param) const;
  // Whether the parameter is the bias of a FactorLayer.
  bool is_joint_bias(const at::Tensor& param) const;
  // For a weight with state.
  void set_layer(const at::Tensor& weight, FactorLayer layer);
  void forget_layers();

  void forget();
  void raise_error();
  // OperatorCapture's.
  int64_t processes() const;
  bool is_used_otherwise(const at::Tensor& param) const;

 private:
  struct Data;
  std::shared_ptr<Data> data_;
  std::unique_ptr<gradients::detail::OperatorCapture> capture_;
};

}  // namespace torchium::optim::detail
