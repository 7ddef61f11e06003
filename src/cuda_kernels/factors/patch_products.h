// The second moment of the patches of a 3 x 3 convolution with stride 1 and padding 1 as products
// of shifted images. A product of patches would compute most of its sums several times.
//
// The element for channels c, c' and pixels k, l of the kernel, in {-1, 0, 1}^2, is the sum over
// output pixels p of x_c[p + k] x_c'[p + l]. With q = p + k and d = l - k it is
//   A[(c, k), (c', l)] = R_d[c, c'] - (terms of pixels q that are p + k of no p),
//   R_d[c, c'] = sum over all pixels q of x_c[q] x_c'[q + d],   x = 0 outside of the image.
// No p + k is in the first row if k_y = 1, in the last row if k_y = -1, in the first column if k_x
// = 1, or in the last column if k_x = -1. In such a row x[q + d] is zero outside of the image if
// d_y != 0, and in such a column if d_x != 0, which leaves four borders:
//   rows:    sum over x of x_c[q] x_c'[q + d] in the first or last row, if d_y = 0,
//   columns: the same over y in the first or last column, if d_x = 0,
//   corners: subtracted twice by rows and columns, if d = 0.
#pragma once

#include "cuda_kernels/factors/moment_product.h"

namespace torchium::cuda_kernels {

constexpr int kPatchSide = 3, kPatchPixels = kPatchSide * kPatchSide;

// The terms of A: R_d for 25 d, rows and columns at two ends for 5 d each, and 4 corners.
namespace patch_terms {
constexpr int kReach = kPatchSide - 1, kSpan = 2 * kReach + 1;
constexpr int kRows = kSpan * kSpan, kColumns = kRows + 2 * kSpan, kCorners = kColumns + 2 * kSpan;
constexpr int kCount = kCorners + 4;

constexpr int whole(int dy, int dx) { return (dy + kReach) * kSpan + dx + kReach; }
constexpr int in_row(bool is_last, int dx) { return kRows + is_last * kSpan + dx + kReach; }
constexpr int in_column(bool is_last, int dy) { return kColumns + is_last * kSpan + dy + kReach; }
constexpr int in_corner(bool is_bottom, bool is_right) {
  return kCorners + 2 * is_bottom + is_right;
}
}  // namespace patch_terms

// Where a term is: element (row + i, column + j) of a product is that of channels (i, j), or of (j,
// i) if transposed.
struct PatchTerm {
  int product, row, column;
  bool is_transposed;
  bool is_symmetric;  // d = 0: only read elements with i >= j
};

struct PatchProducts {
  // Without products of shifted images: that for pixels k and l of the kernel is term 9 k + l.
  static constexpr int kMostTerms = kPatchPixels * kPatchPixels;

  MomentProduct product;
  PatchTerm terms[kMostTerms];
  bool is_of_shifts;
};

PatchProducts patch_products(const Images& images);

// For any other 3 x 3 convolution, with channels in multiples of 64: its product of patches, which
// has one shift for each pixel of the kernel.
PatchProducts products_of_patches(const MomentProduct& product);

}  // namespace torchium::cuda_kernels
