#include "distributed/bucketed_sum.h"

#include <ATen/ATen.h>

#include <functional>
#include <map>

namespace torchium::distributed {
namespace {

using Tensors = std::vector<at::Tensor>;

// Of one dtype each.
std::vector<Tensors> buckets_of(const Tensors& tensors, int64_t bucket_bytes) {
  std::map<at::ScalarType, Tensors> by_dtype;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) {
      by_dtype[tensor.scalar_type()].push_back(tensor.view({-1}));
    }
  }
  std::vector<Tensors> buckets;
  for (const auto& [dtype, members] : by_dtype) {
    int64_t bytes = bucket_bytes;  // of the last bucket: full
    for (const at::Tensor& tensor : members) {
      const auto own = static_cast<int64_t>(tensor.nbytes());
      if (bytes + own > bucket_bytes) {
        buckets.emplace_back();
        bytes = 0;
      }
      buckets.back().push_back(tensor);
      bytes += own;
    }
  }
  return buckets;
}

// Begins the sum of a bucket. Returns what ends it.
std::function<void()> begin(const Communicator& ranks, const Tensors& bucket) {
  if (bucket.size() == 1) {
    return ranks.begin_all_reduce_sum(bucket[0]);
  }
  const at::Tensor all = at::cat(bucket);
  return [bucket, all, wait = ranks.begin_all_reduce_sum(all)] {
    wait();
    Tensors parts;
    int64_t first = 0;
    for (const at::Tensor& tensor : bucket) {
      parts.push_back(all.narrow(0, first, tensor.numel()));
      first += tensor.numel();
    }
    at::_foreach_copy_(bucket, parts);
  };
}

}  // namespace

void sum_in_buckets(const Communicator& ranks, const std::vector<at::Tensor>& tensors,
                    int64_t bucket_bytes) {
  std::function<void()> end = [] {};
  for (const Tensors& bucket : buckets_of(tensors, bucket_bytes)) {
    auto end_of_next = begin(ranks, bucket);
    end();
    end = std::move(end_of_next);
  }
  end();
}

}  // namespace torchium::distributed
