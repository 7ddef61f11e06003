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
      by_dtype[tensor.scalar_type()].push_back(tensor);
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

at::Tensor pack_whole(const Tensors& bucket) {
  Tensors flat;
  for (const at::Tensor& tensor : bucket) {
    flat.push_back(tensor.view({-1}));
  }
  return flat.size() == 1 ? flat[0] : at::cat(flat);
}

void unpack_whole(const Tensors& bucket, const at::Tensor& packed) {
  if (bucket.size() == 1) {  // they share their memory
    return;
  }
  Tensors parts;
  int64_t first = 0;
  for (const at::Tensor& tensor : bucket) {
    parts.push_back(packed.narrow(0, first, tensor.numel()).view(tensor.sizes()));
    first += tensor.numel();
  }
  at::_foreach_copy_(bucket, parts);
}

// Begins the sum of a bucket. Returns what ends it.
std::function<void()> begin(const Communicator& ranks, const Tensors& bucket,
                            const BucketPacking& packing) {
  const at::Tensor packed = packing.pack(bucket);
  return [bucket, packed, &packing, wait = ranks.begin_all_reduce_sum(packed)] {
    wait();
    packing.unpack(bucket, packed);
  };
}

}  // namespace

void sum_in_buckets(const Communicator& ranks, const std::vector<at::Tensor>& tensors,
                    int64_t bucket_bytes, const BucketPacking* packing) {
  static const BucketPacking whole{pack_whole, unpack_whole};
  std::function<void()> end = [] {};
  for (const Tensors& bucket : buckets_of(tensors, bucket_bytes)) {
    auto end_of_next = begin(ranks, bucket, packing == nullptr ? whole : *packing);
    end();
    end = std::move(end_of_next);
  }
  end();
}

}  // namespace torchium::distributed
