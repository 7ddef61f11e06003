#include "optim/natural_gradient/parameter_vectors.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <numeric>

namespace torchium::optim::detail {
namespace {

// Partial sums belong to pieces of this size, whatever thread computes them.
constexpr int64_t kPiece = int64_t{1} << 15;
constexpr int64_t kLanes = 16;  // partial sums side by side, so that the loops vectorise

bool can_fuse(const at::Tensor& x, const at::Tensor& y) {
  return x.is_cpu() && x.scalar_type() == y.scalar_type() && x.is_contiguous() &&
         y.is_contiguous() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble);
}

template <typename scalar_t>
double dot_of_piece(const scalar_t* a, const scalar_t* b, int64_t count) {
  const auto product = [&](int64_t i) {
    return static_cast<double>(a[i]) * static_cast<double>(b[i]);
  };
  std::array<double, kLanes> lanes{};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += product(i + lane);
    }
  }
  double sum = std::accumulate(lanes.begin(), lanes.end(), 0.0);
  for (int64_t i = whole; i < count; ++i) {
    sum += product(i);
  }
  return sum;
}

double dot_on_cpu(const at::Tensor& x, const at::Tensor& y) {
  const int64_t count = x.numel();
  const int64_t pieces = (count + kPiece - 1) / kPiece;
  std::vector<double> partial(pieces);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "dot_on_cpu", [&] {
    const scalar_t* a = x.const_data_ptr<scalar_t>();
    const scalar_t* b = y.const_data_ptr<scalar_t>();
    at::parallel_for(0, pieces, 2, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i * kPiece;
        partial[i] = dot_of_piece(a + first, b + first, std::min(kPiece, count - first));
      }
    });
  });
  return std::accumulate(partial.begin(), partial.end(), 0.0);
}

}  // namespace

at::Tensor dots(at::TensorList x, at::TensorList y) {
  if (std::equal(x.begin(), x.end(), y.begin(), can_fuse)) {
    std::vector<double> sums(x.size());
    std::transform(x.begin(), x.end(), y.begin(), sums.begin(), dot_on_cpu);
    return at::tensor(sums);
  }
  std::vector<at::Tensor> sums;
  for (size_t p = 0; p < x.size(); ++p) {
    // The sum of products is pairwise, where a dot product would add them up one by one.
    sums.push_back((x[p] * y[p]).sum().to(at::kDouble));
  }
  return at::stack(sums);
}

at::Tensor dot(at::TensorList x, at::TensorList y) { return dots(x, y).sum(); }

void add_scaled_(ParameterVector& x, at::TensorList y, const at::Tensor& scale) {
  for (size_t p = 0; p < x.size(); ++p) {
    x[p].addcmul_(y[p], scale.to(x[p].scalar_type()));
  }
}

void add_(ParameterVector& x, const ScaledVector& y) {
  for (size_t p = 0; p < y.x.size(); ++p) {
    x[p].add_(y.x[p], y.scales[p]);
  }
}

}  // namespace torchium::optim::detail
