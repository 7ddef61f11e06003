// Batches of matrices of different orders, solved with one call per order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchium::linalg::detail {

using MatrixGroup = std::vector<size_t>;  // positions in a list of batches, ascending

// Groups batches [..., n, n] that are solved together: equal order, dtype and device. A solve needs
// several times the memory of its matrices, so a group grows only until it has `enough` elements;
// 2^26 keep all cores or a whole GPU busy. Works on tensors with symbolic sizes.
std::vector<MatrixGroup> group_by_order(at::TensorList batches, int64_t enough = int64_t{1} << 26);

// The batches of a group as one: [N, n, n], where N is the total number of matrices.
at::Tensor joined_matrices(at::TensorList batches, const MatrixGroup& group);

// Splits a result for joined_matrices, [N, ...], into the batches of the group: views with the
// leading dimensions of each batch.
std::vector<at::Tensor> split_by_buffer(const at::Tensor& result, at::TensorList batches,
                                        const MatrixGroup& group);

}  // namespace torchium::linalg::detail
