#include "optim/kfac/sharing/shared_sums.h"

#include "distributed/bucketed_sum.h"
#include "optim/kfac/sharing/triangles.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace torchium::optim::detail {
namespace {

using Tensors = std::vector<at::Tensor>;

void append(Tensors& all, const Tensors& more) { all.insert(all.end(), more.begin(), more.end()); }

// The sums that are not of gradients; undefined: none.
Tensors others(const FactorSums& sums) {
  Tensors tensors;
  if (!sums.blocks.defined()) {
    tensors.push_back(sums.A_is_of_gradients ? sums.G : sums.A);
  }
  if (sums.lookup_counts.defined()) {
    tensors.push_back(sums.lookup_counts);
  }
  return tensors;
}

// Samples and rows of each layer, [layers, 2].
at::Tensor counts_of(const std::vector<FactorSums*>& layers, c10::Device device) {
  std::vector<double> counts;
  for (const FactorSums* sums : layers) {
    counts.push_back(static_cast<double>(sums->samples()));
    counts.push_back(static_cast<double>(sums->rows));
  }
  const at::Tensor on_host = at::tensor(counts, at::kDouble).view({-1, 2});
  return device.is_cpu() ? on_host : on_host.pin_memory().to(device, /*non_blocking=*/true);
}

// Whether the tensor is A or G of a layer, with all elements.
bool is_full_factor(const at::Tensor& tensor, const std::vector<FactorSums*>& layers) {
  return tensor.dim() == 3 && tensor.size(-1) == tensor.size(-2) && has_triangle_kernels(tensor) &&
         std::ranges::any_of(layers, [&](const FactorSums* sums) {
           return tensor.is_same(sums->A) || tensor.is_same(sums->G);
         });
}

// Full factors travel as triangles, where there are kernels for that.
void sum_by_kind(const distributed::Communicator& ranks, const std::vector<FactorSums*>& layers,
                 const Tensors& all) {
  Tensors full, rest;
  for (const at::Tensor& tensor : all) {
    (is_full_factor(tensor, layers) ? full : rest).push_back(tensor);
  }
  static const distributed::BucketPacking triangles{pack_triangles, unpack_triangles_};
  distributed::sum_in_buckets(ranks, full, distributed::kBucketBytes, &triangles);
  distributed::sum_in_buckets(ranks, rest, distributed::kBucketBytes);
}

// Makes means of the sums of a layer. count: samples and rows of all ranks.
void divide(FactorSums& sums, const at::Tensor& count) {
  for (const at::Tensor& tensor : sums.of_gradients()) {
    tensor.div_(count[0]);
  }
  if (sums.is_of_table) {
    sums.G.div_(sums.G.sum().clamp_min(1));
  } else if (!sums.blocks.defined()) {
    (sums.A_is_of_gradients ? sums.G : sums.A).div_(count[1]);
  }
  if (sums.lookup_A.defined()) {
    gradients::detail::add_lookup_factors_(sums.A, sums.G, /*rows=*/1, sums.lookup_A,
                                           sums.lookup_counts);
    sums.lookup_A.reset();
    sums.lookup_counts.reset();
  }
  sums.is_joint = true;
}

}  // namespace

void sum_over_ranks(const distributed::Communicator& ranks, const std::vector<FactorSums*>& layers,
                    bool is_divided, bool same_counts) {
  if (layers.empty()) {
    return;
  }
  std::vector<FactorSums*> divided;  // on the device
  Tensors all, of_gradients;
  std::vector<at::Scalar> weights;
  for (FactorSums* sums : layers) {
    append(all, others(*sums));
    if (same_counts && !sums->is_of_table && !sums->lookup_A.defined()) {
      append(all, sums->of_gradients());
      sums->ranks = ranks.size();
      continue;
    }
    const auto N = static_cast<double>(sums->samples());
    append(of_gradients, sums->of_gradients());
    weights.resize(of_gradients.size(), at::Scalar(N * N));
    divided.push_back(sums);
  }
  at::Tensor counts;
  if (!divided.empty()) {
    if (is_divided) {
      at::_foreach_mul_(of_gradients, weights);
    }
    append(all, of_gradients);
    counts = counts_of(divided, of_gradients[0].device());
    all.push_back(counts);
  }
  sum_by_kind(ranks, layers, all);
  for (size_t l = 0; l < divided.size(); ++l) {
    divide(*divided[l], counts[static_cast<int64_t>(l)]);
  }
}

}  // namespace torchium::optim::detail
