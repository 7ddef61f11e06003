// The renewal of roots: which matrices are due, and how they are solved together.
#include "linalg/matrix_functions/matrix_functions.h"
#include "linalg/matrix_functions/matrix_groups.h"
#include "linalg/roots/device_newton.h"
#include "linalg/roots/newton.h"
#include "linalg/spectral/spectral.h"
#include "optim/blocked/preconditioner.h"
#include "optim/blocked/root_failures.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

namespace torchium::optim::detail {
namespace {

// Neighbouring due entries, as ranges of matrices that can be renewed in one call.
struct DueRange {
  double exponent;
  int64_t start;
  int64_t count;
  std::vector<const MatrixBatch::Entry*> entries;
};

std::vector<DueRange> due_ranges(const MatrixBatch& batch, const RootRule& rule,
                                 const std::vector<int64_t>& due_steps) {
  std::vector<DueRange> ranges;
  for (const auto& entry : batch.entries) {
    const int64_t t = due_steps[entry.param];
    if (t == 0) {
      continue;
    }
    const double exponent = root_exponent(rule, static_cast<int64_t>(batch.sizes.size()), t);
    const int64_t count = entry.shape->count();
    if (!ranges.empty() && ranges.back().start + ranges.back().count == entry.start &&
        ranges.back().exponent == exponent) {
      ranges.back().count += count;
      ranges.back().entries.push_back(&entry);
    } else {
      ranges.push_back({exponent, entry.start, count, {&entry}});
    }
  }
  return ranges;
}

// One mode of a range of matrices whose roots are due.
struct DueMatrices {
  MatrixBatch* batch;
  size_t mode;
  const DueRange* range;

  at::Tensor of(const std::vector<at::Tensor>& per_mode) const {
    return per_mode[mode].narrow(0, range->start, range->count);
  }
};

using DueGroup = std::vector<DueMatrices>;

// The matrices of one order, dtype and device. A group has about `enough` elements at most.
std::vector<DueGroup> by_order(const DueGroup& all, int64_t enough) {
  std::vector<at::Tensor> statistics;
  for (const DueMatrices& matrices : all) {
    statistics.push_back(matrices.of(matrices.batch->statistics));
  }
  std::vector<DueGroup> groups;
  for (const auto& group : linalg::detail::group_by_order(statistics, enough)) {
    groups.emplace_back();
    for (const size_t i : group) {
      groups.back().push_back(all[i]);
    }
  }
  return groups;
}

// The c of all matrices, [N] float64; undefined: all are 1.
at::Tensor divisors(const DueGroup& group, const std::vector<StepScalar>& corrections) {
  const auto options = group[0].batch->statistics[0].options().dtype(at::kDouble);
  const StepScalar& first = corrections[group[0].range->entries[0]->param];
  bool is_uniform = !first.device.defined();
  int64_t count = 0;
  for (const DueMatrices& matrices : group) {
    count += matrices.range->count;
    for (const auto* entry : matrices.range->entries) {
      const StepScalar& other = corrections[entry->param];
      is_uniform &= !other.device.defined() && other.host == first.host;
    }
  }
  if (is_uniform) {
    return first.host == 1.0 ? at::Tensor() : at::full({count}, first.host, options);
  }
  std::vector<at::Tensor> each;
  for (const DueMatrices& matrices : group) {
    for (const auto* entry : matrices.range->entries) {
      const StepScalar& c = corrections[entry->param];
      const at::Tensor value =
          c.device.defined() ? c.device.to(at::kDouble) : at::scalar_tensor(c.host, options);
      each.push_back(value.expand({entry->shape->count()}));
    }
  }
  return at::cat(each);
}

// Elements per solve of small matrices, for which launches cost more than memory. Larger batches
// are solved separately.
constexpr int64_t kElementsInPlace = int64_t{1} << 22;
constexpr int64_t kElementsByCopies = int64_t{1} << 26;
// Elements renewed at once on a GPU if the roots have fewer bits than the statistics.
constexpr int64_t kElementsOfCopies = int64_t{1} << 25;
// On the CPU few matrices are renewed at a time, so that their workspace stays in the cache and is
// not returned to the system.
constexpr int64_t kElementsByCopiesOnCpu = int64_t{1} << 18;

// Matrices of order n that are renewed at once, the same number for each thread.
int64_t matrices_at_once_on_cpu(int64_t n) {
  const int64_t threads = at::get_num_threads();
  const int64_t few = std::max<int64_t>(1, kElementsByCopiesOnCpu / std::max<int64_t>(1, n * n));
  return (few + threads - 1) / threads * threads;
}

struct Candidate {
  at::Tensor root;
  at::Tensor accepted;  // [N] bool
};

using linalg::detail::RootRenewal;

RootRenewal part_of(const RootRenewal& all, int64_t begin, int64_t count) {
  const auto slice = [&](const at::Tensor& x) { return x.narrow(0, begin, count); };
  return {slice(all.A), all.divisors.defined() ? slice(all.divisors) : all.divisors,
          slice(all.roots), slice(all.failures)};
}

// A / c.
at::Tensor divided(const RootRenewal& renewal) {
  const at::Tensor& A = renewal.A;
  return renewal.divisors.defined() ? A / renewal.divisors.to(A.scalar_type()).view({-1, 1, 1}) : A;
}

// Statistics of one buffer whose roots are renewed.
RootRenewal renewal(const DueMatrices& matrices, const std::vector<StepScalar>& corrections) {
  const MatrixBatch& batch = *matrices.batch;
  return {matrices.of(batch.statistics), divisors({matrices}, corrections),
          matrices.of(batch.roots), matrices.of(batch.root_failures)};
}

// p if the exponent is -1/p and the iteration takes p. Other exponents use eigenvalues.
std::optional<int64_t> integer_root(double exponent) {
  const double inverse = -1.0 / exponent;
  const double root = std::round(inverse);
  const bool is_integer = root >= 1.0 && root <= linalg::detail::kLargestIteratedRoot &&
                          std::abs(inverse - root) < 1e-9 * root;
  return is_integer ? std::optional(static_cast<int64_t>(root)) : std::nullopt;
}

Candidate compute_root(const at::Tensor& matrices, const RootRule& rule, double exponent) {
  Candidate candidate;
  at::Tensor residual;  // undefined: none is needed
  if (const auto root = integer_root(exponent)) {
    // On the CPU eigenvalues are checked, and used where the iteration fails. A large residual then
    // only means a matrix below the floor.
    using linalg::detail::Residual;
    const auto kind = matrices.is_cpu() ? Residual::kNone : Residual::kEstimate;
    auto result = linalg::detail::matrix_inverse_root(matrices, *root, rule.eps, rule.relative_eps,
                                                      rule.method, kind);
    candidate.root = std::move(result.root);
    residual = std::move(result.residual);
  } else {
    // By eigenvalues, which no failure of an iteration replaces.
    candidate.root = linalg::detail::matrix_power_with_eigensystem(matrices, exponent, rule.eps,
                                                                   rule.relative_eps)
                         .power;
  }
  candidate.accepted = linalg::detail::is_finite(candidate.root);
  if (residual.defined()) {
    candidate.accepted.logical_and_(residual.le(kRootResidualTolerance));
  }
  return candidate;
}

// Stored roots may have fewer bits, and then a smaller range.
void keep_roots(at::Tensor kept, const at::Tensor& roots) {
  constexpr double kLargestBFloat16 = 0x1.FEp127;
  const bool is_rounded = kept.scalar_type() != roots.scalar_type();
  kept.copy_(is_rounded ? roots.clamp(-kLargestBFloat16, kLargestBFloat16) : roots);
}

void take(at::Tensor roots, at::Tensor failures, const Candidate& candidate,
          const FoundInfGuard& guard) {
  const at::Tensor accepted = guard.restrict(candidate.accepted);
  if (roots.is_cpu() && accepted.all().item<bool>()) {
    keep_roots(roots, candidate.root);
    failures.zero_();
    return;
  }
  keep_roots(roots, at::where(accepted.view({-1, 1, 1}), candidate.root, roots));
  const at::Tensor counted = at::where(candidate.accepted, at::zeros_like(failures), failures + 1);
  guard.assign_(failures, counted);
}

// One solve for all of them; stores the accepted roots.
void solve_and_take(const std::vector<RootRenewal>& renewals, const RootRule& rule, double exponent,
                    const FoundInfGuard& guard) {
  std::vector<at::Tensor> inputs;
  linalg::detail::MatrixGroup all;
  for (const RootRenewal& renewal : renewals) {
    all.push_back(inputs.size());
    inputs.push_back(divided(renewal));
  }
  const Candidate candidate =
      compute_root(linalg::detail::joined_matrices(inputs, all), rule, exponent);
  const auto roots = linalg::detail::split_by_buffer(candidate.root, inputs, all);
  const auto accepted = linalg::detail::split_by_buffer(candidate.accepted, inputs, all);
  for (const size_t i : all) {
    take(renewals[i].roots, renewals[i].failures, {roots[i], accepted[i]}, guard);
  }
}

// Computes roots in new memory: matrices of one order together, large buffers in parts.
void renew_by_copies(const DueGroup& all, const RootRule& rule, double exponent,
                     const std::vector<StepScalar>& corrections, const FoundInfGuard& guard) {
  std::vector<RootRenewal> parts;
  std::vector<at::Tensor> statistics;
  for (const DueMatrices& matrices : all) {
    const RootRenewal whole = renewal(matrices, corrections);
    const int64_t count = whole.A.size(0);
    const int64_t at_once =
        whole.A.is_cpu() ? matrices_at_once_on_cpu(whole.A.size(-1)) : std::max<int64_t>(1, count);
    for (int64_t begin = 0; begin < count; begin += at_once) {
      parts.push_back(part_of(whole, begin, std::min(at_once, count - begin)));
      statistics.push_back(parts.back().A);
    }
  }
  const bool on_cpu = !parts.empty() && statistics[0].is_cpu();
  const int64_t enough = on_cpu ? kElementsByCopiesOnCpu : kElementsByCopies;
  for (const auto& group : linalg::detail::group_by_order(statistics, enough)) {
    std::vector<RootRenewal> together;
    for (const size_t i : group) {
      together.push_back(parts[i]);
    }
    solve_and_take(together, rule, exponent, guard);
  }
}

static_assert(kRootResidualTolerance == linalg::detail::kNewtonResidualTolerance);

// Several buffers of matrices of one order, joined.
RootRenewal joined(const DueGroup& group, const std::vector<StepScalar>& corrections) {
  if (group.size() == 1) {
    return renewal(group[0], corrections);
  }
  const auto join = [&](const auto& tensors_of) {
    std::vector<at::Tensor> tensors;
    for (const DueMatrices& matrices : group) {
      tensors.push_back(matrices.of(tensors_of(*matrices.batch)));
    }
    return at::cat(tensors);
  };
  return {join([](const MatrixBatch& batch) { return batch.statistics; }),
          divisors(group, corrections), join([](const MatrixBatch& batch) { return batch.roots; }),
          join([](const MatrixBatch& batch) { return batch.root_failures; })};
}

// Writes joined roots back.
void write_back(const RootRenewal& joined, const DueGroup& group) {
  if (group.size() == 1) {
    return;
  }
  std::vector<at::Tensor> roots, failures;
  std::vector<int64_t> counts;
  for (const DueMatrices& matrices : group) {
    roots.push_back(matrices.of(matrices.batch->roots));
    failures.push_back(matrices.of(matrices.batch->root_failures));
    counts.push_back(matrices.range->count);
  }
  at::_foreach_copy_(roots, joined.roots.split_with_sizes(counts));
  at::_foreach_copy_(failures, joined.failures.split_with_sizes(counts));
}

// Renews roots in place, with the kernels for p-th roots.
void renew_in_place(const std::vector<RootRenewal>& all, const RootRule& rule, int64_t p,
                    const FoundInfGuard& guard) {
  const auto renew = [&](const std::vector<RootRenewal>& batches) {
    linalg::detail::renew_inverse_roots(batches, p, rule.eps, rule.relative_eps, guard.keep());
  };
  std::vector<RootRenewal> batches;
  for (const RootRenewal& each : all) {
    if (each.roots.scalar_type() == each.A.scalar_type()) {
      batches.push_back(each);
      continue;
    }
    // Roots with fewer bits are renewed as copies, in parts.
    const int64_t count = each.roots.size(0), elements = each.roots.size(1) * each.roots.size(2);
    const int64_t at_once =
        std::max<int64_t>(1, kElementsOfCopies / std::max<int64_t>(1, elements));
    for (int64_t begin = 0; begin < count; begin += at_once) {
      RootRenewal part = part_of(each, begin, std::min(at_once, count - begin));
      const at::Tensor kept = part.roots;
      part.roots = kept.to(part.A.scalar_type());
      renew({part});
      keep_roots(kept, part.roots);
    }
  }
  renew(batches);
}

// Renews the roots of all these matrices, with few solves per order.
void renew_all(const DueGroup& all, const RootRule& rule, double exponent,
               const std::vector<StepScalar>& corrections, const FoundInfGuard& guard) {
  const std::optional<int64_t> p = integer_root(exponent);
  DueGroup small, others;
  std::vector<DueGroup> groups;  // of one solve each
  for (const DueMatrices& matrices : all) {
    const at::Tensor statistics = matrices.of(matrices.batch->statistics);
    if (!p || rule.method == "eigh" || !linalg::detail::has_device_root(statistics, *p)) {
      others.push_back(matrices);
    } else if (statistics.numel() <= kElementsInPlace) {
      small.push_back(matrices);
    } else {
      groups.push_back({matrices});
    }
  }
  for (DueGroup& group : by_order(small, kElementsInPlace)) {
    groups.push_back(std::move(group));
  }
  if (!groups.empty()) {
    std::vector<RootRenewal> renewals;
    for (const DueGroup& group : groups) {
      renewals.push_back(joined(group, corrections));
    }
    renew_in_place(renewals, rule, *p, guard);
    for (size_t i = 0; i < groups.size(); ++i) {
      write_back(renewals[i], groups[i]);
    }
  }
  renew_by_copies(others, rule, exponent, corrections, guard);
}

}  // namespace

bool renews_on_device(const MatrixBatch& batch, const RootRule& rule) {
  const auto p =
      integer_root(root_exponent(rule, static_cast<int64_t>(batch.sizes.size()), kLateStep));
  return p && rule.method != "eigh" &&
         std::ranges::all_of(batch.statistics, [&](const at::Tensor& statistics) {
           return linalg::detail::has_device_root(statistics, *p);
         });
}

void update_roots(std::vector<MatrixBatch>& batches, const RootRule& rule,
                  const std::vector<int64_t>& due_steps, const std::vector<StepScalar>& corrections,
                  const FoundInfGuard& guard) {
  std::vector<std::vector<DueRange>> ranges;  // of each batch
  ranges.reserve(batches.size());
  std::map<double, DueGroup> by_exponent;
  for (auto& batch : batches) {
    ranges.push_back(due_ranges(batch, rule, due_steps));
    for (const DueRange& range : ranges.back()) {
      for (size_t mode = 0; mode < batch.sizes.size(); ++mode) {
        by_exponent[range.exponent].push_back({&batch, mode, &range});
      }
    }
  }
  for (const auto& [exponent, matrices] : by_exponent) {
    renew_all(matrices, rule, exponent, corrections, guard);
  }
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
