// Products for Kronecker factors on a GPU.
#pragma once

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/factors/moment_product.h"
#include "gradients/jacobian/patches.h"

#include <ATen/core/Tensor.h>

namespace torchium::gradients::detail {

// Whether the current device has the kernel of moment_product().
bool has_moment_products();

// What the plan writes: its workspace.
at::Tensor product_in_parts(const cuda_kernels::MomentProduct& product,
                            const cuda_kernels::MomentParts& parts,
                            const at::TensorOptions& options);

// Whether gram_of_rows() takes X [1, vector, count] and is faster than a product in float32: its
// vectors are rows of a matrix, and there are many multiplications.
bool has_gram_of_rows(const at::Tensor& X);

// X X^T, [vector, vector], by tensor cores: every element as two fp16 numbers (split_fp16.h), for
// nearly float32 precision.
at::Tensor gram_of_rows(const at::Tensor& X);

// [n, channels, height, width] with the channels of a pixel side by side.
at::Tensor channels_last(const at::Tensor& image);

}  // namespace torchium::gradients::detail
#endif
