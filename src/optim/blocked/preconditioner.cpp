#include "optim/blocked/preconditioner.h"

#include "linalg/products/symmetric_update.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cmath>

namespace torchium::optim::detail {
namespace {

// mat_i(x): [count, n_i, product of the other sizes].
at::Tensor matricize(const at::Tensor& blocks, int64_t mode) {
  if (blocks.dim() == 2) {
    return blocks.unsqueeze(-1);
  }
  if (blocks.dim() == 3) {
    return mode == 0 ? blocks : blocks.transpose(1, 2);
  }
  return blocks.movedim(mode + 1, 1).flatten(2);
}

// x x_i R: multiplies mode i of every block by its symmetric R.
at::Tensor mode_product(const at::Tensor& blocks, const at::Tensor& roots, int64_t mode) {
  if (blocks.dim() == 2) {
    return at::bmm(roots, blocks.unsqueeze(-1)).squeeze(-1);
  }
  if (blocks.dim() == 3) {
    return mode == 0 ? at::bmm(roots, blocks) : at::bmm(blocks, roots);
  }
  const at::Tensor moved = blocks.movedim(mode + 1, 1);
  return at::bmm(roots, moved.flatten(2)).view(moved.sizes()).movedim(1, mode + 1);
}

}  // namespace

double root_exponent(const RootRule& rule, int64_t order, int64_t t) {
  const double first = 2.0 * static_cast<double>(order);  // p of -1/(2k)
  const double last = rule.exponent.has_value() ? -1.0 / *rule.exponent : first;
  if (t >= rule.exponent_warmup) {
    return rule.exponent.value_or(-1.0 / first);
  }
  const double progress = static_cast<double>(t) / static_cast<double>(rule.exponent_warmup);
  return -1.0 / (first + std::trunc((last - first) * progress));
}

bool root_is_due(int64_t t, int64_t start, int64_t update_freq) {
  if (t <= start) {
    return t == start;
  }
  const auto octave = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(t)));
  const int64_t interval = std::max<int64_t>(1, octave / 4);
  return t % update_freq == 0 || (interval < update_freq && t % interval == 0);
}

void update_statistics(MatrixBatch& batch, const at::Tensor& gradients, double beta2,
                       const FoundInfGuard& guard) {
  for (size_t mode = 0; mode < batch.sizes.size(); ++mode) {
    at::Tensor& statistics = batch.statistics[mode];
    const at::Tensor matrix = matricize(gradients, static_cast<int64_t>(mode));
    if (beta2 == 1.0) {
      linalg::detail::symmetric_update_(statistics, matrix, 1.0, 1.0);
    } else if (!guard.keep().defined()) {
      linalg::detail::symmetric_update_(statistics, matrix, beta2, 1.0 - beta2);
    } else {
      at::Tensor product = at::empty_like(statistics);
      linalg::detail::symmetric_update_(product, matrix, 0.0, 1.0);
      guard.lerp_(statistics, product, 1.0 - beta2);
    }
  }
}

at::Tensor precondition(const MatrixBatch& batch, const at::Tensor& gradients) {
  at::Tensor direction = gradients;
  for (size_t mode = 0; mode < batch.sizes.size(); ++mode) {
    const at::Tensor roots = batch.roots[mode].to(direction.scalar_type());
    direction = mode_product(direction, roots, static_cast<int64_t>(mode));
  }
  return direction;
}

}  // namespace torchium::optim::detail
