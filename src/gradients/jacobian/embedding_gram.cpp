#include "gradients/jacobian/embedding_gram.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace torchium::gradients::detail {
namespace {

// If at least this many samples have looked up one table row, a matrix product is faster than
// single inner products.
constexpr int64_t kMinProductSamples = 16;

// The lookups of all samples, by table row: entry k is the sum of all e of one sample at one row.
struct Lookups {
  std::vector<int64_t> samples;  // of every entry
  std::vector<int64_t> groups;   // where the entries of each table row begin, and the end
  at::Tensor sums;               // [entries, dim]
};

template <typename scalar_t>
Lookups sum_lookups(const at::Tensor& indices, const at::Tensor& e) {
  const int64_t T = indices.size(1);
  const int64_t dim = e.size(2);
  const int64_t* index = indices.const_data_ptr<int64_t>();
  const auto* values = e.const_data_ptr<scalar_t>();
  std::vector<int64_t> order(indices.numel());
  std::iota(order.begin(), order.end(), int64_t{0});
  // Positions are already ordered by sample.
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return index[a] < index[b]; });
  Lookups result;
  std::vector<int64_t> entries(order.size());  // of each position in this order
  for (size_t k = 0; k < order.size(); ++k) {
    const bool new_row = k == 0 || index[order[k]] != index[order[k - 1]];
    if (new_row) {
      result.groups.push_back(static_cast<int64_t>(result.samples.size()));
    }
    if (new_row || order[k] / T != result.samples.back()) {
      result.samples.push_back(order[k] / T);
    }
    entries[k] = static_cast<int64_t>(result.samples.size()) - 1;
  }
  result.groups.push_back(static_cast<int64_t>(result.samples.size()));
  result.sums = at::zeros({static_cast<int64_t>(result.samples.size()), dim}, e.options());
  auto* sums = result.sums.mutable_data_ptr<scalar_t>();
  for (size_t k = 0; k < order.size(); ++k) {
    const scalar_t* value = values + order[k] * dim;
    scalar_t* sum = sums + entries[k] * dim;
    for (int64_t d = 0; d < dim; ++d) {
      sum[d] += value[d];
    }
  }
  return result;
}

template <typename scalar_t>
double inner_product(const scalar_t* x, const scalar_t* y, int64_t size) {
  constexpr int64_t kLanes = 8;  // independent partial sums, so that the loop vectorises
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += static_cast<double>(x[i + lane]) * static_cast<double>(y[i + lane]);
    }
  }
  double sum = std::accumulate(lanes, lanes + kLanes, 0.0);
  for (; i < size; ++i) {
    sum += static_cast<double>(x[i]) * static_cast<double>(y[i]);
  }
  return sum;
}

// Adds the inner products of all pairs of entries [begin, end), which share a table row.
template <typename scalar_t>
void add_group(double* K, int64_t n, const Lookups& lookups, int64_t begin, int64_t end,
               double weight) {
  const int64_t count = end - begin;
  const int64_t* samples = lookups.samples.data() + begin;
  if (count >= kMinProductSamples) {
    const at::Tensor rows = lookups.sums.narrow(0, begin, count).to(at::kDouble);
    const at::Tensor products = at::mm(rows, rows.t());
    const double* product = products.const_data_ptr<double>();
    for (int64_t a = 0; a < count; ++a) {
      for (int64_t b = 0; b < count; ++b) {
        K[samples[a] * n + samples[b]] += weight * product[a * count + b];
      }
    }
    return;
  }
  const int64_t dim = lookups.sums.size(1);
  const scalar_t* rows = lookups.sums.const_data_ptr<scalar_t>() + begin * dim;
  for (int64_t a = 0; a < count; ++a) {
    for (int64_t b = 0; b <= a; ++b) {
      const double product = weight * inner_product(rows + a * dim, rows + b * dim, dim);
      K[samples[a] * n + samples[b]] += product;
      if (a != b) {
        K[samples[b] * n + samples[a]] += product;
      }
    }
  }
}

// The same indices renumbered from zero without gaps, at most one number per position. Their order
// does not matter for products of two rows. The host reads nothing.
at::Tensor renumbered(const at::Tensor& indices) {
  const auto [sorted, order] = at::sort(indices.flatten());
  const at::Tensor is_new = at::zeros_like(sorted);
  is_new.narrow(0, 1, sorted.numel() - 1)
      .copy_(sorted.narrow(0, 1, sorted.numel() - 1) != sorted.narrow(0, 0, sorted.numel() - 1));
  return at::empty_like(sorted).scatter_(0, order, is_new.cumsum(0)).view(indices.sizes());
}

}  // namespace

at::Tensor scatter_lookups(const at::Tensor& indices, const at::Tensor& e, int64_t table_rows) {
  const int64_t n = indices.size(0);
  const at::Tensor first = at::arange(n, indices.options()).mul_(table_rows).unsqueeze(1);
  // Not index_add_, whose order of summation on a GPU changes from run to run.
  return at::embedding_dense_backward(e, indices + first, n * table_rows, /*padding_idx=*/-1,
                                      /*scale_grad_by_freq=*/false)
      .view({n, table_rows, e.size(2)});
}

at::Tensor squared_lookup_norms(const at::Tensor& indices, const at::Tensor& e,
                                int64_t table_rows) {
  const int64_t n = indices.size(0);
  if (indices.numel() == 0) {
    return at::zeros({n}, e.options().dtype(at::kDouble));
  }
  // One entry per sample and table row: the sum of its e.
  const at::Tensor first = at::arange(n, indices.options()).mul_(table_rows).unsqueeze(1);
  const at::Tensor entries = renumbered(indices + first);
  const at::Tensor sums =
      at::embedding_dense_backward(e, entries, entries.numel(), /*padding_idx=*/-1,
                                   /*scale_grad_by_freq=*/false);
  const at::Tensor norms = squared_norms_of(sums);
  // An entry of k positions is counted k times, so each time by 1 / k.
  const at::Tensor positions = at::zeros_like(norms).scatter_add_(
      0, entries.flatten(), at::ones({entries.numel()}, norms.options()));
  return norms.div_(positions).index_select(0, entries.flatten()).view(entries.sizes()).sum(1);
}

void add_embedding_gram_(at::Tensor& K, const at::Tensor& indices, const at::Tensor& e,
                         int64_t table_rows, double weight, int64_t max_workspace) {
  if (indices.numel() == 0) {
    return;
  }
  const int64_t n = indices.size(0);
  const bool many_rows = indices.numel() < table_rows;
  const at::Tensor rows = many_rows ? renumbered(indices) : indices;
  const int64_t row_count = many_rows ? indices.numel() : table_rows;
  const int64_t chunk = std::max<int64_t>(1, max_workspace / (n * row_count));
  for (int64_t first = 0; first < e.size(2); first += chunk) {
    const at::Tensor columns = e.narrow(2, first, std::min(chunk, e.size(2) - first));
    add_product_of_rows_(K, scatter_lookups(rows, columns, row_count).flatten(1), weight);
  }
}

void add_embedding_gram_on_cpu_(at::Tensor& K, const at::Tensor& indices, const at::Tensor& e,
                                double weight) {
  AT_DISPATCH_FLOATING_TYPES(e.scalar_type(), "add_embedding_gram_on_cpu_", [&] {
    const Lookups lookups = sum_lookups<scalar_t>(indices.contiguous(), e.contiguous());
    auto* products = K.mutable_data_ptr<double>();
    for (size_t group = 0; group + 1 < lookups.groups.size(); ++group) {
      add_group<scalar_t>(products, K.size(0), lookups, lookups.groups[group],
                          lookups.groups[group + 1], weight);
    }
  });
}

}  // namespace torchium::gradients::detail
