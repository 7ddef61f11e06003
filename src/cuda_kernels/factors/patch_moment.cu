#include "cuda_kernels/factors/moment_parts.cuh"
#include "cuda_kernels/factors/patch_moment.h"

#include <algorithm>

namespace torchium::cuda_kernels {
namespace {

// A block writes the elements of 8 x 8 channels, 72 x 72, on or below the diagonal, and their
// mirror image.
constexpr int kChannels = 8;
constexpr int kWidth = kChannels * kPatchPixels;
constexpr int kThreadRows = 12;
constexpr int kThreads = kWidth * kThreadRows;
constexpr int kTile = MomentParts::kTile;
static_assert(kTile % kChannels == 0);  // the channels of a block are in one tile of each product

struct Arguments {
  PatchTerm terms[PatchProducts::kMostTerms];
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

template <bool is_of_shifts>
constexpr int kTerms = is_of_shifts ? patch_terms::kCount : PatchProducts::kMostTerms;

// Of pixels k and l of the kernel, from 0 on.
template <bool is_of_shifts>
__device__ ElementTerms terms_of(int k, int l) {
  using namespace patch_terms;
  constexpr int kNone = kTerms<is_of_shifts>;  // a term that is zero
  const auto term = [](bool exists, int index) {
    return static_cast<unsigned char>(exists ? index : kNone);
  };
  if constexpr (!is_of_shifts) {
    const unsigned char none = term(false, 0);
    return {term(true, k * kPatchPixels + l), none, none, none};
  }
  constexpr int kLast = kPatchSide - 1;
  const int y = k / kPatchSide, x = k % kPatchSide;
  const int dy = l / kPatchSide - y, dx = l % kPatchSide - x;
  const bool has_row = dy == 0 && y != kLast / 2, has_column = dx == 0 && x != kLast / 2;
  // The last row of the kernel does not see the first row of the image.
  return {term(true, whole(dy, dx)), term(has_row, in_row(y == 0, dx)),
          term(has_column, in_column(x == 0, dy)),
          term(has_row && has_column, in_corner(y == 0, x == 0))};
}

// The parts of a term in a block.
struct TermParts {
  const float* first;  // element of the first part
  int count;
};

// top >= left: the first channels of the block.
__device__ TermParts parts_of_term(const Arguments& arguments, const PatchTerm& term, int top,
                                   int left) {
  const int i = term.row + (term.is_transposed ? left : top);
  const int j = term.column + (term.is_transposed ? top : left);
  const TileSeries& series = arguments.parts.series[term.product];
  const MomentTile tile = moment_tile(series, i / kTile, j / kTile);
  const PartRange range = parts_of(series, tile, arguments.parts.share);
  return {first_part(arguments.workspace, series, tile, range) + i % kTile * kTile + j % kTile,
          range.last - range.first + 1};
}

template <bool is_of_shifts>
__global__ void __launch_bounds__(kThreads)
    store_kernel(const __grid_constant__ Arguments arguments) {
  constexpr int kCount = kTerms<is_of_shifts>;
  __shared__ float values[kCount + 1][kChannels][kChannels + 1];
  __shared__ TermParts parts[kCount];
  __shared__ ElementTerms table[kPatchPixels][kPatchPixels];
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  const int thread = y * kWidth + x;
  const TriangleTile block(static_cast<int>(blockIdx.x));
  const int top = block.row * kChannels, left = block.column * kChannels;
  if (thread < kPatchPixels * kPatchPixels) {
    table[thread / kPatchPixels][thread % kPatchPixels] =
        terms_of<is_of_shifts>(thread / kPatchPixels, thread % kPatchPixels);
  }
  if (thread < kCount) {
    parts[thread] = parts_of_term(arguments, arguments.terms[thread], top, left);
  }
  __syncthreads();
  constexpr int kPairs = kChannels * kChannels;
  for (int v = thread; v < (kCount + 1) * kPairs; v += kThreads) {
    const int index = v / kPairs;
    int i = v % kPairs / kChannels, j = v % kChannels;  // row and column of the product
    if (index == kCount) {
      values[index][i][j] = 0;
      continue;
    }
    const PatchTerm& term = arguments.terms[index];
    const bool is_above = top == left && term.is_symmetric && i < j;
    const float value = sum_of_parts(
        parts[index].first + (is_above ? j * kTile + i : i * kTile + j), parts[index].count);
    values[index][term.is_transposed ? j : i][term.is_transposed ? i : j] = value;
  }
  __syncthreads();
  // Of row i and column j of the block.
  const auto element = [&](int i, int j) {
    const ElementTerms& terms = table[i % kPatchPixels][j % kPatchPixels];
    const auto value = [&](int index) { return values[index][i / kPatchPixels][j / kPatchPixels]; };
    return value(terms.whole) - value(terms.row) - value(terms.column) + value(terms.corner);
  };
  const auto store = [&](int row, int column, float value) {
    float* place = arguments.target + int64_t{row} * arguments.order + column;
    *place = arguments.accumulate ? *place + value : value;
  };
  for (int i = y; i < kWidth; i += kThreadRows) {
    store(top * kPatchPixels + i, left * kPatchPixels + x, element(i, x));
  }
  if (top == left) return;
  for (int j = y; j < kWidth; j += kThreadRows) {
    store(left * kPatchPixels + j, top * kPatchPixels + x, element(x, j));
  }
}

}  // namespace

cudaError_t store_patch_moment(const PatchMoment& moment, cudaStream_t stream) {
  const MomentProduct& product = moment.products->product;
  Arguments arguments{};
  std::copy_n(moment.products->terms, PatchProducts::kMostTerms, arguments.terms);
  arguments.parts = *moment.parts;
  arguments.workspace = moment.workspace;
  arguments.target = moment.target;
  arguments.order = moment.order;
  arguments.accumulate = moment.accumulate;
  const int blocks = triangle_tiles(product.images.channels / kChannels);
  const auto kernel = moment.products->is_of_shifts ? store_kernel<true> : store_kernel<false>;
  kernel<<<blocks, dim3(kWidth, kThreadRows), 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace torchium::cuda_kernels
