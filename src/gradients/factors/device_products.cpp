#include "gradients/factors/device_products.h"

#ifdef TORCHIUM_WITH_CUDA
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

namespace torchium::gradients::detail {

bool has_moment_products() {
  const cudaDeviceProp* device = at::cuda::getCurrentDeviceProperties();
  return cuda_kernels::has_moment_product(device->major, device->minor,
                                          static_cast<int>(device->sharedMemPerBlockOptin));
}

at::Tensor product_in_parts(const cuda_kernels::MomentProduct& product,
                            const cuda_kernels::MomentParts& parts,
                            const at::TensorOptions& options) {
  const at::Tensor workspace = at::empty({parts.elements()}, options.dtype(at::kFloat));
  C10_CUDA_CHECK(cuda_kernels::moment_product(product, parts, workspace.mutable_data_ptr<float>(),
                                              c10::cuda::getCurrentCUDAStream()));
  return workspace;
}

at::Tensor channels_last(const at::Tensor& image) {
  return (image.dim() == 3 ? image.unsqueeze(0) : image).contiguous(at::MemoryFormat::ChannelsLast);
}

}  // namespace torchium::gradients::detail
#endif
