#include "optim/preconditioner.h"

#include "linalg/matrix_functions.h"
#include "linalg/stack_groups.h"
#include "linalg/symmetric_update.h"
#include "optim/root_failures.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>

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

// Neighbouring due entries, as ranges of matrices that can be renewed in one call.
struct DueRange {
  int64_t start;
  int64_t count;
  std::vector<const MatrixBatch::Entry*> entries;
};

std::vector<DueRange> due_ranges(const MatrixBatch& batch, const std::vector<bool>& due) {
  std::vector<DueRange> ranges;
  for (const auto& entry : batch.entries) {
    if (!due[entry.param]) {
      continue;
    }
    const int64_t count = entry.shape->count();
    if (!ranges.empty() && ranges.back().start + ranges.back().count == entry.start) {
      ranges.back().count += count;
      ranges.back().entries.push_back(&entry);
    } else {
      ranges.push_back({entry.start, count, {&entry}});
    }
  }
  return ranges;
}

// One mode of a range of matrices whose roots are due.
struct DueMatrices {
  MatrixBatch* batch;
  size_t mode;
  const DueRange* range;

  at::Tensor of(const std::vector<at::Tensor>& one_a_mode) const {
    return one_a_mode[mode].narrow(0, range->start, range->count);
  }
};

// L / c, where every parameter has its own c.
at::Tensor corrected(const DueMatrices& matrices, const std::vector<StepScalar>& corrections) {
  const at::Tensor statistics = matrices.of(matrices.batch->statistics);
  const DueRange& range = *matrices.range;
  const StepScalar& first = corrections[range.entries[0]->param];
  const bool uniform =
      std::all_of(range.entries.begin(), range.entries.end(), [&](const MatrixBatch::Entry* entry) {
        const StepScalar& other = corrections[entry->param];
        return !other.device.defined() && !first.device.defined() && other.host == first.host;
      });
  if (uniform || range.entries.size() == 1) {
    return first.divide(statistics);
  }
  std::vector<at::Tensor> each;
  for (const auto* entry : range.entries) {
    const StepScalar& c = corrections[entry->param];
    const at::Tensor value = c.device.defined() ? c.device.to(statistics.scalar_type())
                                                : at::scalar_tensor(c.host, statistics.options());
    each.push_back(value.expand({entry->shape->count()}));
  }
  return statistics / at::cat(each).view({-1, 1, 1});
}

struct Candidate {
  at::Tensor root;
  at::Tensor accepted;  // [N] bool
};

Candidate compute_root(const at::Tensor& matrices, const RootRule& rule, double exponent) {
  const double inverse = -1.0 / exponent;
  const double root = std::round(inverse);
  Candidate candidate;
  if (root >= 1.0 && std::abs(inverse - root) < 1e-9 * root) {
    auto result = linalg::detail::matrix_inverse_root(matrices, static_cast<int64_t>(root),
                                                      rule.eps, rule.relative_eps, rule.method,
                                                      linalg::detail::Residual::kEstimate);
    candidate.root = std::move(result.root);
    candidate.accepted = result.residual.le(kRootResidualTolerance);  // false for NaN
  } else {
    candidate.root = linalg::detail::matrix_power(matrices, exponent, rule.eps, rule.relative_eps);
    candidate.accepted = at::ones({matrices.size(0)}, matrices.options().dtype(at::kBool));
  }
  // The sum of a matrix is finite only if all entries are; overflow of a sum counts as failure.
  candidate.accepted.logical_and_(at::isfinite(candidate.root.sum({-2, -1})));
  return candidate;
}

void renew(at::Tensor roots, at::Tensor failures, const Candidate& candidate,
           const StepGate& gate) {
  const at::Tensor accepted = gate.restrict(candidate.accepted);
  if (roots.is_cpu() && accepted.all().item<bool>()) {
    roots.copy_(candidate.root);
    failures.zero_();
    return;
  }
  roots.copy_(at::where(accepted.view({-1, 1, 1}), candidate.root, roots));
  const at::Tensor counted = at::where(candidate.accepted, at::zeros_like(failures), failures + 1);
  gate.assign_(failures, counted);
}

// Renews the roots of all these matrices, those of one order in one solve.
void renew_all(const std::vector<DueMatrices>& all, const RootRule& rule, double exponent,
               const std::vector<StepScalar>& corrections, const StepGate& gate) {
  std::vector<at::Tensor> statistics;
  for (const DueMatrices& matrices : all) {
    statistics.push_back(matrices.of(matrices.batch->statistics));
  }
  for (const auto& group : linalg::detail::group_by_order(statistics)) {
    std::vector<at::Tensor> inputs = statistics;
    for (const size_t i : group) {
      inputs[i] = corrected(all[i], corrections);
    }
    const Candidate candidate =
        compute_root(linalg::detail::joined_stacks(inputs, group), rule, exponent);
    const auto roots = linalg::detail::split_by_stack(candidate.root, inputs, group);
    const auto accepted = linalg::detail::split_by_stack(candidate.accepted, inputs, group);
    for (size_t k = 0; k < group.size(); ++k) {
      const DueMatrices& matrices = all[group[k]];
      renew(matrices.of(matrices.batch->roots), matrices.of(matrices.batch->root_failures),
            {roots[k], accepted[k]}, gate);
    }
  }
}

}  // namespace

bool root_is_due(int64_t t, int64_t start, int64_t update_freq) {
  if (t <= start) {
    return t == start;
  }
  const bool power_of_two = (t & (t - 1)) == 0;
  return t % update_freq == 0 || (t < update_freq && power_of_two);
}

void update_statistics(MatrixBatch& batch, const at::Tensor& gradients, double beta2,
                       const StepGate& gate) {
  for (size_t mode = 0; mode < batch.sizes.size(); ++mode) {
    at::Tensor& statistics = batch.statistics[mode];
    const at::Tensor matrix = matricize(gradients, static_cast<int64_t>(mode));
    if (beta2 == 1.0) {
      linalg::detail::symmetric_update_(statistics, matrix, 1.0, 1.0);
    } else if (!gate.keep().defined()) {
      linalg::detail::symmetric_update_(statistics, matrix, beta2, 1.0 - beta2);
    } else {
      at::Tensor product = at::empty_like(statistics);
      linalg::detail::symmetric_update_(product, matrix, 0.0, 1.0);
      gate.lerp_(statistics, product, 1.0 - beta2);
    }
  }
}

void update_roots(std::vector<MatrixBatch>& batches, const RootRule& rule,
                  const std::vector<bool>& due, const std::vector<StepScalar>& corrections,
                  const StepGate& gate) {
  std::vector<std::vector<DueRange>> ranges;  // of each batch
  ranges.reserve(batches.size());
  std::map<double, std::vector<DueMatrices>> by_exponent;
  for (auto& batch : batches) {
    const size_t order = batch.sizes.size();  // k
    const double exponent = rule.exponent.value_or(-1.0 / (2.0 * static_cast<double>(order)));
    ranges.push_back(due_ranges(batch, due));
    for (const DueRange& range : ranges.back()) {
      for (size_t mode = 0; mode < order; ++mode) {
        by_exponent[exponent].push_back({&batch, mode, &range});
      }
    }
  }
  for (const auto& [exponent, matrices] : by_exponent) {
    renew_all(matrices, rule, exponent, corrections, gate);
  }
}

at::Tensor precondition(const MatrixBatch& batch, const at::Tensor& gradients) {
  at::Tensor direction = gradients;
  for (size_t mode = 0; mode < batch.sizes.size(); ++mode) {
    direction = mode_product(direction, batch.roots[mode], static_cast<int64_t>(mode));
  }
  return direction;
}

void record_root_failures(const std::vector<MatrixBatch>& batches, at::Tensor& status) {
  std::vector<RootFailures> all;
  for (const auto& batch : batches) {
    for (const auto& failures : batch.root_failures) {
      if (failures.is_cpu() && failures.max().item<int>() == 0) {
        continue;
      }
      for (const auto& entry : batch.entries) {
        all.push_back({failures.narrow(0, entry.start, entry.shape->count()), entry.param});
      }
    }
  }
  record_root_failures(all, status);
}

}  // namespace torchium::optim::detail
