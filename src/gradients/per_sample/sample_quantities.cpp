#include "gradients/per_sample/sample_evaluation.h"
#include "gradients/per_sample/sample_values.h"
#include "linalg/common/operand_checks.h"
#include "torchium/gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <vector>

namespace torchium::gradients {
namespace {

using detail::Jacobian;
using detail::SampleLoss;
using detail::TrainableParameters;
using OfSample = std::vector<at::Tensor>;

void check_trainable(const TrainableParameters& trainable) {
  TORCH_CHECK_VALUE(!trainable.params.empty(), "no parameter of the model requires a gradient");
}

at::Tensor zeros_for(const SampleLoss& loss, const TrainableParameters& trainable) {
  return at::zeros({loss.samples()},
                   trainable.params[0].options().dtype(at::kDouble).requires_grad(false));
}

at::Tensor norm_of(const OfSample& gradients, const at::TensorOptions& options) {
  at::Tensor squares = at::zeros({}, options);
  for (const auto& gradient : gradients) {
    if (gradient.defined()) {
      squares.add_(at::linalg_vector_norm(gradient, 2, {}, false, at::kDouble).square_());
    }
  }
  return squares.sqrt_();
}

// Adds to `.grad` as a backward pass does.
void accumulate(const at::Tensor& param, const at::Tensor& sum) {
  at::Tensor& grad = param.mutable_grad();
  if (!grad.defined()) {
    grad = at::empty_like(param, param.options().requires_grad(false)).copy_(sum);
  } else if (grad.is_sparse()) {
    grad = sum.to(param.scalar_type()).add(grad);
  } else {
    grad.add_(sum);
  }
}

// How many float64 gradients fit, one at least.
int64_t samples_at_a_time(const std::vector<at::Tensor>& params, int64_t max_workspace_bytes) {
  int64_t bytes = 0;
  for (const auto& param : params) {
    bytes += param.numel() * static_cast<int64_t>(sizeof(double));
  }
  return std::max<int64_t>(1, max_workspace_bytes / std::max<int64_t>(1, bytes));
}

// Sets the rows and columns of the Gram matrix of samples [first, last), from `first` on. Their
// gradients are kept; each later one is multiplied by all of them.
void add_products(at::Tensor& K, int64_t first, int64_t last, const std::vector<at::Tensor>& params,
                  const detail::SampleVisit& visit) {
  std::vector<at::Tensor> rows;
  for (const auto& param : params) {
    rows.push_back(at::zeros({last - first, param.numel()}, K.options()));
  }
  visit(first, [&](int64_t i, const OfSample& of_sample) {
    at::Tensor products = at::zeros({last - first}, K.options());
    for (const auto p : c10::irange(of_sample.size())) {
      if (of_sample[p].defined()) {
        const at::Tensor gradient = of_sample[p].flatten().to(at::kDouble);
        if (i < last) {
          rows[p][i - first].copy_(gradient);
        }
        products.addmv_(rows[p], gradient);  // rows that are still to come are zero
      }
    }
    const int64_t known = std::min(i + 1, last) - first;
    K[i].narrow(0, first, known).copy_(products.narrow(0, 0, known));
    K.select(1, i).narrow(0, first, known).copy_(products.narrow(0, 0, known));
  });
}

}  // namespace

at::Tensor per_sample_norms(const torch::nn::Module& model, const ForwardFunction& forward,
                            const LossFunction& loss_fn, const at::Tensor& inputs,
                            const at::Tensor& targets, int64_t max_workspace_bytes) {
  detail::check_workspace(max_workspace_bytes);
  const SampleLoss loss(model, forward, loss_fn, inputs, targets);
  const TrainableParameters trainable(model);
  check_trainable(trainable);
  at::Tensor norms = zeros_for(loss, trainable);
  detail::evaluate(
      "per_sample_norms", loss, trainable,
      [&](const Jacobian& jacobian) { norms = jacobian.norms(max_workspace_bytes); },
      [&](int64_t i, const OfSample& of_sample) {
        norms[i].copy_(norm_of(of_sample, norms.options()));
      });
  return norms.to(detail::widest_state_dtype(trainable.params));
}

at::Tensor gram(const torch::nn::Module& model, const ForwardFunction& forward,
                const LossFunction& loss_fn, const at::Tensor& inputs, const at::Tensor& targets,
                int64_t max_workspace_bytes) {
  detail::check_workspace(max_workspace_bytes);
  const SampleLoss loss(model, forward, loss_fn, inputs, targets);
  const TrainableParameters trainable(model);
  check_trainable(trainable);
  at::Tensor K = at::zeros({loss.samples(), loss.samples()}, zeros_for(loss, trainable).options());
  detail::evaluate(
      "gram", loss, trainable,
      [&](const Jacobian& jacobian) { K = detail::gram_of(jacobian, trainable.params.size()); },
      [&](const detail::SampleVisit& visit) {
        const int64_t step = samples_at_a_time(trainable.params, max_workspace_bytes);
        for (int64_t first = 0; first < loss.samples(); first += step) {
          add_products(K, first, std::min(first + step, loss.samples()), trainable.params, visit);
        }
      });
  return K;
}

at::Tensor jvp_dots(const torch::nn::Module& model, const ForwardFunction& forward,
                    const LossFunction& loss_fn, const at::Tensor& inputs,
                    const at::Tensor& targets,
                    const torch::OrderedDict<std::string, at::Tensor>& vectors,
                    int64_t max_workspace_bytes) {
  detail::check_workspace(max_workspace_bytes);
  const SampleLoss loss(model, forward, loss_fn, inputs, targets);
  const TrainableParameters trainable(model);
  check_trainable(trainable);
  const std::vector<at::Tensor> v = detail::as_state(trainable.params, trainable.names, vectors);
  at::Tensor result = zeros_for(loss, trainable);
  detail::evaluate(
      "jvp_dots", loss, trainable, [&](const Jacobian& jacobian) { result = jacobian.product(v); },
      [&](int64_t i, const OfSample& of_sample) {
        for (const auto p : c10::irange(of_sample.size())) {
          if (of_sample[p].defined()) {
            result[i].add_((of_sample[p].to(v[p].scalar_type()) * v[p]).sum(at::kDouble));
          }
        }
      });
  return result.to(detail::widest_state_dtype(trainable.params));
}

at::Tensor clip_and_accumulate(const torch::nn::Module& model, const ForwardFunction& forward,
                               const LossFunction& loss_fn, const at::Tensor& inputs,
                               const at::Tensor& targets, double max_norm,
                               int64_t max_workspace_bytes) {
  detail::check_max_norm(max_norm);
  detail::check_workspace(max_workspace_bytes);
  const SampleLoss loss(model, forward, loss_fn, inputs, targets, /*least=*/0);
  const TrainableParameters trainable(model);
  check_trainable(trainable);
  at::Tensor norms = zeros_for(loss, trainable);
  std::vector<at::Tensor> sums;
  for (const auto& param : trainable.params) {
    sums.push_back(at::zeros(
        param.sizes(),
        param.options().dtype(linalg::detail::compute_dtype(param)).requires_grad(false)));
  }
  detail::evaluate(
      "clip_and_accumulate", loss, trainable,
      [&](const Jacobian& jacobian) {
        norms = jacobian.norms(max_workspace_bytes);
        sums = jacobian.transpose_product(detail::clip_factors(norms, max_norm));
      },
      [&](int64_t i, const OfSample& of_sample) {
        const at::Tensor norm = norm_of(of_sample, norms.options());
        const at::Tensor factor = detail::clip_factors(norm, max_norm);
        norms[i].copy_(norm);
        for (const auto p : c10::irange(of_sample.size())) {
          if (of_sample[p].defined()) {
            sums[p].addcmul_(of_sample[p].to(sums[p].scalar_type()),
                             factor.to(sums[p].scalar_type()));
          }
        }
      });
  const at::NoGradGuard no_grad;
  for (const auto p : c10::irange(sums.size())) {
    accumulate(trainable.params[p], sums[p]);
  }
  return norms.to(detail::widest_state_dtype(trainable.params));
}

}  // namespace torchium::gradients
