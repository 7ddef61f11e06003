#include "linalg/products/structured_matrix.h"

#include "linalg/products/toeplitz.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace torchium::linalg::detail {
namespace {

// X [batch, n, columns] as [batch * blocks, b, columns], with zeros below a shorter last block.
at::Tensor in_blocks(const at::Tensor& X, int64_t b) {
  const int64_t missing = (b - X.size(1) % b) % b;
  const at::Tensor padded = missing == 0 ? X : at::constant_pad_nd(X, {0, 0, 0, missing});
  return padded.reshape({-1, b, X.size(2)});
}

// The inverse of in_blocks(), contiguous.
at::Tensor out_of_blocks(const at::Tensor& blocks, int64_t batch, int64_t n) {
  return blocks.reshape({batch, -1, blocks.size(2)}).narrow(1, 0, n).contiguous();
}

// Views of the diagonal: of all whole blocks, and of a shorter last one.
std::vector<at::Tensor> diagonals_of_blocks(const at::Tensor& M) {
  const int64_t b = M.size(2);
  const int64_t whole = M.size(1) / b * b;
  const int64_t rest = M.size(1) - whole;
  std::vector<at::Tensor> views{
      M.narrow(1, 0, whole).unflatten(1, {whole / b, b}).diagonal(0, -2, -1)};
  if (rest > 0) {
    views.push_back(M.narrow(1, whole, rest).narrow(2, 0, rest).diagonal(0, -2, -1));
  }
  return views;
}

}  // namespace

Structure structure_of(const at::Tensor& M) {
  return M.dim() == 2             ? Structure::kDiagonal
         : M.size(2) == M.size(1) ? Structure::kDense
         : M.size(2) == 1         ? Structure::kToeplitz
                                  : Structure::kBlockDiagonal;
}

std::vector<int64_t> stored_sizes(int64_t batch, int64_t n, Structure structure, int64_t block) {
  switch (structure) {
    case Structure::kDiagonal:
      return {batch, n};
    case Structure::kToeplitz:
      return {batch, n, 1};
    case Structure::kBlockDiagonal:
      return {batch, n, std::min(block, n)};
    default:
      return {batch, n, n};
  }
}

at::Tensor structured_multiply(const at::Tensor& M, const at::Tensor& X, bool transposed) {
  const auto oriented = [&](const at::Tensor& matrices) {
    return transposed ? matrices.mT() : matrices;
  };
  switch (structure_of(M)) {
    case Structure::kDiagonal:
      return M.unsqueeze(-1) * X;
    case Structure::kToeplitz:
      return toeplitz_multiply(M, X, transposed);
    case Structure::kBlockDiagonal:
      return out_of_blocks(at::bmm(oriented(in_blocks(M, M.size(2))), in_blocks(X, M.size(2))),
                           X.size(0), X.size(1));
    default:
      return at::bmm(oriented(M), X);
  }
}

// The columns of a stored matrix are columns of the matrix, or of its blocks.
at::Tensor structured_product(const at::Tensor& M, const at::Tensor& N) {
  return M.dim() == 2 ? M * N : structured_multiply(M, N);
}

at::Tensor structured_gram(const at::Tensor& M) {
  switch (structure_of(M)) {
    case Structure::kDiagonal:
      return M.square();
    case Structure::kToeplitz:
      return toeplitz_gram(M);
    default:
      return structured_multiply(M, M, /*transposed=*/true);
  }
}

at::Tensor structured_congruence(const at::Tensor& M, const at::Tensor& S) {
  switch (structure_of(M)) {
    case Structure::kDiagonal:
      return M.square() * S;
    case Structure::kToeplitz:
      return S;
    default:
      return structured_multiply(M, structured_multiply(S, M), /*transposed=*/true);
  }
}

at::Tensor structured_moment(const at::Tensor& X, at::IntArrayRef sizes, const at::Tensor& M) {
  if (sizes.size() == 2) {
    return X.square().sum(2);
  }
  if (sizes[2] == sizes[1]) {
    return at::bmm(X, X.mT());
  }
  if (sizes[2] == 1) {
    return toeplitz_moment(X, M);
  }
  const at::Tensor blocks = in_blocks(X, sizes[2]);
  return out_of_blocks(at::bmm(blocks, blocks.mT()), X.size(0), X.size(1));
}

void add_to_diagonal_(at::Tensor& M, double value) {
  switch (structure_of(M)) {
    case Structure::kDiagonal:
      M.add_(value);
      return;
    case Structure::kToeplitz:
      M.select(1, 0).add_(value);
      return;
    case Structure::kBlockDiagonal:
      for (at::Tensor view : diagonals_of_blocks(M)) {
        view.add_(value);
      }
      return;
    default:
      M.diagonal(0, -2, -1).add_(value);
  }
}

at::Tensor structured_diagonal(const at::Tensor& M) {
  switch (structure_of(M)) {
    case Structure::kDiagonal:
      return M;
    case Structure::kToeplitz:
      return M.select(1, 0).expand({-1, M.size(1)});
    case Structure::kBlockDiagonal: {
      std::vector<at::Tensor> parts;
      for (const at::Tensor& view : diagonals_of_blocks(M)) {
        parts.push_back(view.flatten(1));
      }
      return at::cat(parts, 1);
    }
    default:
      return M.diagonal(0, -2, -1);
  }
}

at::Tensor average_trace(const at::Tensor& M) {
  return structured_diagonal(M).sum(1).div_(static_cast<double>(std::max<int64_t>(1, M.size(1))));
}

at::Tensor largest_row_sum(const at::Tensor& M) {
  if (M.numel() == 0) {
    return at::zeros({M.size(0)}, M.options());
  }
  switch (structure_of(M)) {
    case Structure::kDiagonal:
      return M.abs().amax(1);
    case Structure::kToeplitz:
      return M.abs().sum({1, 2});
    default:
      return M.abs().sum(2).amax(1);
  }
}

}  // namespace torchium::linalg::detail
