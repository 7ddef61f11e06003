#include "cuda_kernels/factors/moment_parts.cuh"
#include "cuda_kernels/factors/patch_moment.h"

#include <algorithm>

namespace torchium::cuda_kernels {
namespace {

// A block writes the elements of 8 x 8 channels, 72 x 72.
constexpr int kChannels = 8;
constexpr int kWidth = kChannels * kPatchPixels;
constexpr int kThreadRows = 12;
constexpr int kThreads = kWidth * kThreadRows;
constexpr int kNone = patch_terms::kCount;  // a term that is zero

struct Arguments {
  PatchTerm terms[patch_terms::kCount];
  MomentParts parts;
  const float* workspace;
  float* target;
  int order;
  bool accumulate;
};

// An element is whole - row - column + corner.
struct ElementTerms {
  unsigned char whole, row, column, corner;
};

// Of pixels k and l of the kernel, from 0 on.
__device__ ElementTerms terms_of(int k, int l) {
  using namespace patch_terms;
  constexpr int kLast = kPatchSide - 1;
  const int y = k / kPatchSide, x = k % kPatchSide;
  const int dy = l / kPatchSide - y, dx = l % kPatchSide - x;
  const bool has_row = dy == 0 && y != kLast / 2, has_column = dx == 0 && x != kLast / 2;
  // The last row of the kernel does not see the first row of the image.
  const auto row = in_row(y == 0, dx), column = in_column(x == 0, dy);
  const auto corner = in_corner(y == 0, x == 0);
  const auto term = [](bool exists, int index) {
    return static_cast<unsigned char>(exists ? index : kNone);
  };
  return {term(true, whole(dy, dx)), term(has_row, row), term(has_column, column),
          term(has_row && has_column, corner)};
}

// The term for channels i and j, of rows and columns of its product.
__device__ float value_of(const Arguments& arguments, const PatchTerm& term, int i, int j) {
  constexpr int kTile = MomentParts::kTile;
  if (term.is_symmetric && i < j) {
    const int swapped = i;
    i = j;
    j = swapped;
  }
  const TileSeries& series = arguments.parts.series[term.product];
  const MomentTile tile = moment_tile(series, i / kTile, j / kTile);
  const int place = (term.row + i % kTile) * kTile + term.column + j % kTile;
  return sum_of_parts(arguments.workspace, series, tile,
                      parts_of(series, tile, arguments.parts.share), place);
}

__global__ void __launch_bounds__(kThreads)
    store_kernel(const __grid_constant__ Arguments arguments) {
  __shared__ float values[patch_terms::kCount + 1][kChannels][kChannels + 1];
  __shared__ ElementTerms table[kPatchPixels][kPatchPixels];
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  const int thread = y * kWidth + x;
  const int top = static_cast<int>(blockIdx.y) * kChannels;
  const int left = static_cast<int>(blockIdx.x) * kChannels;
  if (thread < kPatchPixels * kPatchPixels) {
    table[thread / kPatchPixels][thread % kPatchPixels] =
        terms_of(thread / kPatchPixels, thread % kPatchPixels);
  }
  constexpr int kPairs = kChannels * kChannels;
  for (int i = thread; i < (patch_terms::kCount + 1) * kPairs; i += kThreads) {
    const int index = i / kPairs, hi = i % kPairs / kChannels, lo = i % kChannels;
    if (index == kNone) {
      values[index][hi][lo] = 0;
      continue;
    }
    const PatchTerm& term = arguments.terms[index];
    // Neighbouring threads read neighbouring columns of the product.
    if (term.is_transposed) {
      values[index][lo][hi] = value_of(arguments, term, left + hi, top + lo);
    } else {
      values[index][hi][lo] = value_of(arguments, term, top + hi, left + lo);
    }
  }
  __syncthreads();
  const int column = x / kPatchPixels, l = x % kPatchPixels;
  for (int i = y; i < kWidth; i += kThreadRows) {
    const int row = i / kPatchPixels;
    const ElementTerms& terms = table[i % kPatchPixels][l];
    const auto value = [&](int index) { return values[index][row][column]; };
    float* place = arguments.target + int64_t{top * kPatchPixels + i} * arguments.order +
                   left * kPatchPixels + x;
    const float sum =
        value(terms.whole) - value(terms.row) - value(terms.column) + value(terms.corner);
    *place = arguments.accumulate ? *place + sum : sum;
  }
}

}  // namespace

cudaError_t store_patch_moment(const PatchMoment& moment, cudaStream_t stream) {
  const MomentProduct& product = moment.products->product;
  Arguments arguments{};
  std::copy_n(moment.products->terms, patch_terms::kCount, arguments.terms);
  arguments.parts = *moment.parts;
  arguments.workspace = moment.workspace;
  arguments.target = moment.target;
  arguments.order = moment.order;
  arguments.accumulate = moment.accumulate;
  const unsigned groups = product.images.channels / kChannels;
  store_kernel<<<dim3(groups, groups), dim3(kWidth, kThreadRows), 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
