// Backward passes of the curvature of a loss through captured layer calls.
#pragma once

#include "gradients/capture/call_gradients.h"
#include "optim/capture/loss_curvature.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// ValueError if there are no calls although `outputs` come from another model: no parameter of
// which `is_known` is true is in their graph.
void check_origin(const at::Tensor& outputs, const char* optimizer,
                  const std::vector<gradients::detail::DifferentiableCall>& calls,
                  const std::function<bool(const at::Tensor&)>& is_known);

// For columns of "ggn" through a layer with fewer rows than the outputs: each mixes several outputs
// of a row.
std::string several_rows_message(int64_t rows, const at::Tensor& outputs, const std::string& name);

// The samples of one forward pass: curvatures of several outputs of it, as of heads, add up.
struct CurvatureBatch {
  int64_t number;    // since forget()
  int64_t samples;   // of the first of these outputs
  double scale = 1;  // of the columns of other outputs, whose losses are means over other numbers
};

class CurvatureBatches {
 public:
  // The batch of outputs that depend on these calls: that of outputs before, if they share a call.
  CurvatureBatch add(const std::vector<gradients::detail::DifferentiableCall>& calls,
                     int64_t samples);
  // Whether it has not returned true for this call, which add() knows.
  bool is_first_visit(const gradients::detail::DifferentiableCall& call);

  int64_t size() const { return size_; }
  int64_t samples() const { return samples_; }  // of all batches
  void forget() { *this = {}; }

 private:
  struct Known {
    CurvatureBatch batch;
    bool is_visited = false;
  };
  using Call = std::weak_ptr<const gradients::detail::PendingCall>;

  std::map<Call, Known, std::owner_less<Call>> calls_;
  int64_t size_ = 0;
  int64_t samples_ = 0;
};

// Calls visit(k, i, call) for each column k of the curvature and each of the calls i that depends
// on it. The output gradient of `call` is scale J^T v, with v the column and J the Jacobian of
// `outputs` with respect to the output of the layer: the sum over k of (J^T v)(J^T v)^T is J^T H J.
// Keeps the graph.
void for_each_curvature_gradient(
    const at::Tensor& outputs, const LossCurvature& curvature, double scale,
    const std::vector<gradients::detail::DifferentiableCall>& calls,
    const std::function<void(int64_t, size_t, gradients::detail::LayerCall)>& visit);

}  // namespace torchium::optim::detail
