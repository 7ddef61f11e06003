#include "optim/kfac/sharing/triangles.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/factors/triangles.h"
#include "optim/core/cuda/kernel_tables.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <c10/util/Exception.h>

namespace torchium::optim::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

int64_t matrices_in(const at::Tensor& tensor) {
  return tensor.numel() / (tensor.size(-1) * tensor.size(-1));
}

int64_t packed_numbers(const at::Tensor& tensor) {
  const int64_t n = tensor.size(-1);
  return matrices_in(tensor) * (n * (n + 1) / 2);
}

KernelTables<cuda_kernels::TriangleEntry> tables_of(const std::vector<at::Tensor>& matrices,
                                                    const at::Tensor& packed) {
  KernelTables<cuda_kernels::TriangleEntry> tables;
  auto* triangles = packed.mutable_data_ptr<float>();
  for (const at::Tensor& tensor : matrices) {
    const cuda_kernels::TriangleEntry entry{.matrices = tensor.mutable_data_ptr<float>(),
                                            .triangles = triangles,
                                            .n = static_cast<int>(tensor.size(-1)),
                                            .first_tile = 0};
    tables.add(entry, static_cast<int>(matrices_in(tensor)) * entry.tiles_per_matrix());
    triangles += packed_numbers(tensor);
  }
  return tables;
}

}  // namespace

bool has_triangle_kernels(const at::Tensor& matrices) {
  return matrices.is_cuda() && matrices.scalar_type() == at::kFloat;
}

at::Tensor pack_triangles(const std::vector<at::Tensor>& matrices) {
  int64_t numbers = 0;
  for (const at::Tensor& tensor : matrices) {
    numbers += packed_numbers(tensor);
  }
  at::Tensor packed = at::empty({numbers}, matrices[0].options());
  for (const auto& table : tables_of(matrices, packed)) {
    C10_CUDA_CHECK(cuda_kernels::pack_triangles(table, c10::cuda::getCurrentCUDAStream()));
  }
  return packed;
}

void unpack_triangles_(const std::vector<at::Tensor>& matrices, const at::Tensor& packed) {
  for (const auto& table : tables_of(matrices, packed)) {
    C10_CUDA_CHECK(cuda_kernels::unpack_triangles(table, c10::cuda::getCurrentCUDAStream()));
  }
}

#else

bool has_triangle_kernels(const at::Tensor&) { return false; }

at::Tensor pack_triangles(const std::vector<at::Tensor>&) {
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
}

void unpack_triangles_(const std::vector<at::Tensor>&, const at::Tensor&) {
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
}

#endif

}  // namespace torchium::optim::detail
