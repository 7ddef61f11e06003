#include "optim/natural_gradient/sharing/shared_rows.h"

#include <ATen/ATen.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <numeric>

namespace torchium::optim::detail {
namespace {

// Tensors one after the other, in a dtype that holds them all.
at::Tensor joined(const std::vector<at::Tensor>& tensors) {
  at::ScalarType dtype = tensors[0].scalar_type();
  for (const at::Tensor& tensor : tensors) {
    dtype = at::promote_types(dtype, tensor.scalar_type());
  }
  std::vector<at::Tensor> flat;
  for (const at::Tensor& tensor : tensors) {
    flat.push_back(tensor.reshape(-1).to(dtype));
  }
  return at::cat(flat);
}

// The inverse of joined(), in the shapes and dtypes of `like`.
std::vector<at::Tensor> split_like(const at::Tensor& flat, const std::vector<at::Tensor>& like) {
  std::vector<at::Tensor> parts;
  int64_t first = 0;
  for (const at::Tensor& tensor : like) {
    parts.push_back(
        flat.narrow(0, first, tensor.numel()).view(tensor.sizes()).to(tensor.scalar_type()));
    first += tensor.numel();
  }
  return parts;
}

}  // namespace

SharedRows::SharedRows(distributed::Communicator ranks, std::vector<int64_t> counts)
    : ranks_(std::move(ranks)),
      counts_(std::move(counts)),
      total_(std::accumulate(counts_.begin(), counts_.end(), int64_t{0})),
      first_(std::accumulate(counts_.begin(), counts_.begin() + ranks_.rank(), int64_t{0})) {}

at::Tensor SharedRows::gather(const at::Tensor& own) const {
  const int64_t most = *std::ranges::max_element(counts_);
  at::Tensor part = at::zeros({most}, own.options());
  part.narrow(0, 0, own_count()).copy_(own);
  const at::Tensor all = at::empty({ranks_.size(), most}, own.options());
  ranks_.begin_all_gather(part, all)();
  std::vector<at::Tensor> parts;
  for (const auto rank : c10::irange(ranks_.size())) {
    parts.push_back(all[rank].narrow(0, 0, counts_[rank]));
  }
  return at::cat(parts);
}

at::Tensor SharedRows::of_ranks(const at::Tensor& own) const {
  const at::Tensor all = at::empty({ranks_.size()}, own.options());
  ranks_.begin_all_gather(own.reshape({1}), all)();
  return expand(all.unbind());
}

at::Tensor SharedRows::weights_of_mean_gradient(const at::TensorOptions& options) const {
  std::vector<at::Tensor> weights;
  for (const int64_t count : counts_) {
    weights.push_back(
        at::scalar_tensor(static_cast<double>(total_) / static_cast<double>(ranks_.size() * count),
                          options.dtype(at::kDouble)));
  }
  return expand(weights);
}

at::Tensor SharedRows::expand(const std::vector<at::Tensor>& of_ranks) const {
  std::vector<at::Tensor> parts;
  for (const auto rank : c10::irange(counts_.size())) {
    parts.push_back(of_ranks[rank].expand({counts_[rank]}));
  }
  return at::cat(parts);
}

std::vector<at::Tensor> SharedRows::sum(const std::vector<at::Tensor>& own) const {
  at::Tensor all = joined(own);
  ranks_.all_reduce_sum_(all);
  return split_like(all, own);
}

void SharedRows::equalize_(const std::vector<at::Tensor>& tensors) const {
  at::Tensor all = joined(tensors);
  ranks_.broadcast_(all);
  const auto parts = split_like(all, tensors);
  for (const auto i : c10::irange(tensors.size())) {
    tensors[i].copy_(parts[i]);
  }
}

}  // namespace torchium::optim::detail
