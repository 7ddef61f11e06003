#include "optim/kfac/sharing/triangles.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/factors/triangles.h"
#include "optim/core/cuda/kernel_tables.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <ATen/ATen.h>

namespace torchium::optim::detail {
namespace {

int64_t matrices_in(const at::Tensor& tensor) {
  return tensor.numel() / (tensor.size(-1) * tensor.size(-1));
}

int64_t packed_numbers(const at::Tensor& tensor) {
  const int64_t n = tensor.size(-1);
  return matrices_in(tensor) * (n * (n + 1) / 2);
}

// Calls f(matrices [N, n, n], triangles [N, n (n + 1) / 2]) for each tensor.
template <typename F>
void for_each_pair(const std::vector<at::Tensor>& matrices, const at::Tensor& packed, const F& f) {
  int64_t first = 0;
  for (const at::Tensor& tensor : matrices) {
    const int64_t n = tensor.size(-1), numbers = packed_numbers(tensor);
    f(tensor.view({-1, n, n}), packed.narrow(0, first, numbers).view({matrices_in(tensor), -1}));
    first += numbers;
  }
}

#ifdef TORCHIUM_WITH_CUDA
bool has_kernels(const at::Tensor& tensor) {
  return tensor.is_cuda() && tensor.scalar_type() == at::kFloat;
}

KernelTables<cuda_kernels::TriangleEntry> tables_of(const std::vector<at::Tensor>& matrices,
                                                    const at::Tensor& packed) {
  KernelTables<cuda_kernels::TriangleEntry> tables;
  for_each_pair(matrices, packed, [&](const at::Tensor& all, const at::Tensor& triangles) {
    const cuda_kernels::TriangleEntry entry{.matrices = all.mutable_data_ptr<float>(),
                                            .triangles = triangles.mutable_data_ptr<float>(),
                                            .n = static_cast<int>(all.size(-1)),
                                            .first_tile = 0};
    tables.add(entry, static_cast<int>(all.size(0)) * entry.tiles_per_matrix());
  });
  return tables;
}
#endif

at::Tensor indices_of(const at::Tensor& matrices) {
  const int64_t n = matrices.size(-1);
  return at::tril_indices(n, n, 0, matrices.options().dtype(at::kLong));
}

}  // namespace

at::Tensor pack_triangles(const std::vector<at::Tensor>& matrices) {
  int64_t numbers = 0;
  for (const at::Tensor& tensor : matrices) {
    numbers += packed_numbers(tensor);
  }
  at::Tensor packed = at::empty({numbers}, matrices[0].options());
#ifdef TORCHIUM_WITH_CUDA
  if (has_kernels(packed)) {
    for (const auto& table : tables_of(matrices, packed)) {
      C10_CUDA_CHECK(cuda_kernels::pack_triangles(table, c10::cuda::getCurrentCUDAStream()));
    }
    return packed;
  }
#endif
  for_each_pair(matrices, packed, [](const at::Tensor& all, const at::Tensor& triangles) {
    const at::Tensor ij = indices_of(all);
    triangles.copy_(all.index({at::indexing::Slice(), ij[0], ij[1]}));
  });
  return packed;
}

void unpack_triangles_(const std::vector<at::Tensor>& matrices, const at::Tensor& packed) {
#ifdef TORCHIUM_WITH_CUDA
  if (has_kernels(packed)) {
    for (const auto& table : tables_of(matrices, packed)) {
      C10_CUDA_CHECK(cuda_kernels::unpack_triangles(table, c10::cuda::getCurrentCUDAStream()));
    }
    return;
  }
#endif
  for_each_pair(matrices, packed, [](at::Tensor all, const at::Tensor& triangles) {
    const at::Tensor ij = indices_of(all);
    all.index_put_({at::indexing::Slice(), ij[0], ij[1]}, triangles);
    all.index_put_({at::indexing::Slice(), ij[1], ij[0]}, triangles);
  });
}

}  // namespace torchium::optim::detail
