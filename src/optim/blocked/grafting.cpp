#include "optim/blocked/grafting.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace torchium::optim::detail {
namespace {

// For the blocks of one parameter, in place. Without the dispatcher, which would take longer than
// the work on a bias.
template <typename T>
void graft_blocks_on_cpu(T* d, const T* f, int64_t elements, int64_t block_size) {
  const auto norm = [](const T* x, int64_t count) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) {
      sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    }
    return std::sqrt(sum);
  };
  block_size = std::min(block_size, std::max<int64_t>(1, elements));
  const int64_t blocks = (elements + block_size - 1) / block_size;
  at::parallel_for(0, blocks, /*grain_size=*/16, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * block_size; at < std::min(end * block_size, elements);
         at += block_size) {
      const int64_t count = std::min(block_size, elements - at);
      const double length = norm(d + at, count);
      const T scale = length > 0.0 ? static_cast<T>(norm(f + at, count) / length) : T(0);
      for (int64_t i = at; i < at + count; ++i) {
        d[i] *= scale;
      }
    }
  });
}

}  // namespace

at::Tensor graft(const at::Tensor& directions, const at::Tensor& grafted) {
  const auto norms_of = [](const at::Tensor& blocks) {  // those of order zero have one dimension
    return blocks.reshape({blocks.size(0), -1}).norm(2, {1});
  };
  const at::Tensor norms = norms_of(directions);
  const at::Tensor scale = norms_of(grafted) / norms;
  std::vector<int64_t> sizes(directions.dim(), 1);
  sizes[0] = -1;
  return directions * at::where(norms.gt(0), scale, at::zeros_like(scale)).view(sizes);
}

at::Tensor graft_diagonal(const at::Tensor& direction, const at::Tensor& grafted,
                          int64_t block_size) {
  const auto dtype = direction.scalar_type();
  const bool is_plain =
      direction.is_contiguous() && grafted.is_contiguous() && grafted.scalar_type() == dtype;
  if (direction.is_cpu() && is_plain && (dtype == at::kFloat || dtype == at::kDouble)) {
    AT_DISPATCH_FLOATING_TYPES(dtype, "graft_diagonal", [&] {
      graft_blocks_on_cpu(direction.mutable_data_ptr<scalar_t>(),
                          grafted.const_data_ptr<scalar_t>(), direction.numel(), block_size);
    });
    return direction;
  }
  std::vector<at::Tensor> parts;
  const auto directions = direction.reshape({1, -1}).split(block_size, 1);
  const auto grafted_parts = grafted.reshape({1, -1}).split(block_size, 1);
  for (size_t i = 0; i < directions.size(); ++i) {
    parts.push_back(graft(directions[i], grafted_parts[i]));
  }
  return at::cat(parts, 1).view(direction.sizes());
}

}  // namespace torchium::optim::detail
