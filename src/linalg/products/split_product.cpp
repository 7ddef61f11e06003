#include "linalg/products/split_product.h"

#include <c10/util/Exception.h>

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/split_gemm/batched_product.h"
#include "cuda_kernels/split_gemm/row_scaled_split.h"
#include "support/alignment.h"
#include "support/device_code.h"
#include "support/phase.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#endif

namespace torchium::linalg::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

// Below these sizes float32 arithmetic is as fast as splitting the operands.
constexpr int64_t kLeastSide = 256;
constexpr double kLeastMultiplications = 1e9;  // m n k

cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream(); }

cuda_kernels::SplitFp16 parts_of(const TileOperand& operand, float* one) {
  const at::Tensor& x = operand.values;
  auto* hi = reinterpret_cast<__half*>(x.mutable_data_ptr<at::Half>());
  return {hi,
          hi + x.stride(0),
          one,
          static_cast<int>(x.size(1)),
          static_cast<int>(x.size(2)),
          /*has_scales=*/false};
}

TileOperand split(const at::Tensor& x, bool by_columns, at::Tensor& buffer) {
  torchium::detail::check_device_code(x.device());
  const int64_t rows = x.size(0), columns = x.size(1), pitch = TileProduct::pitch(columns);
  const TileOperand operand{view_of(buffer, {2, rows, pitch}, x.options().dtype(at::kHalf)),
                            at::zeros({by_columns ? columns : rows}, x.options())};
  const cuda_kernels::FloatMatrix matrix{x.const_data_ptr<float>(), rows, columns, x.stride(0),
                                         x.stride(1)};
  auto* largest = operand.largest.mutable_data_ptr<float>();
  C10_CUDA_CHECK(cuda_kernels::find_largest(matrix, by_columns, largest, stream()));
  auto* hi = reinterpret_cast<__half*>(operand.values.mutable_data_ptr<at::Half>());
  C10_CUDA_CHECK(cuda_kernels::split_scaled(
      {matrix, largest, by_columns, hi, hi + rows * pitch, pitch}, stream()));
  return operand;
}

// The kernel writes contiguous rows of a multiple of 8 elements, at a multiple of 16 bytes.
bool is_kernel_writable(const at::Tensor& out) {
  return out.is_contiguous() && out.size(1) % 8 == 0 && torchium::detail::is_aligned(out);
}

}  // namespace

bool has_split_product(c10::Device device) {
  if (!device.is_cuda()) return false;
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(device.index());
  return cuda_kernels::has_batched_product(properties->major, properties->minor,
                                           static_cast<int>(properties->sharedMemPerBlockOptin));
}

bool split_product_pays(c10::Device device, int64_t m, int64_t n, int64_t k) {
  return std::min({m, n, k}) >= kLeastSide &&
         static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) >=
             kLeastMultiplications &&
         has_split_product(device);
}

TileOperand split_rows(const at::Tensor& A, at::Tensor& buffer) { return split(A, false, buffer); }

TileOperand split_columns(const at::Tensor& B, at::Tensor& buffer) {
  return split(B, true, buffer);
}

void multiply_split_out(at::Tensor& out, const TileOperand& A, const TileOperand& B,
                        at::Tensor& buffer) {
  const int64_t rows = out.size(0), columns = out.size(1), pitch = TileProduct::pitch(columns);
  const at::Tensor product =
      is_kernel_writable(out) ? out : view_of(buffer, {rows, pitch}, out.options());
  at::Tensor one = at::ones({1}, out.options());
  auto* C = product.mutable_data_ptr<float>();
  const cuda_kernels::BatchedProduct arguments{parts_of(A, one.mutable_data_ptr<float>()),
                                               parts_of(B, one.mutable_data_ptr<float>()), C,
                                               /*matrices=*/1};
  constexpr auto kKind = cuda_kernels::ProductKind::kGeneral;
  const auto done = cuda_kernels::work_of(kKind, &arguments, 1, /*single=*/false);
  const torchium::detail::KernelWork work(done.flops, done.bytes);
  C10_CUDA_CHECK(
      cuda_kernels::batched_products(kKind, &arguments, 1, nullptr, /*single=*/false, stream()));
  C10_CUDA_CHECK(cuda_kernels::remove_scales(
      {C, pitch, A.largest.const_data_ptr<float>(), B.largest.const_data_ptr<float>(),
       out.mutable_data_ptr<float>(), rows, columns, out.stride(0)},
      stream()));
}
#else

bool has_split_product(c10::Device) { return false; }

bool split_product_pays(c10::Device, int64_t, int64_t, int64_t) { return false; }

TileOperand split_rows(const at::Tensor&, at::Tensor&) { TORCH_INTERNAL_ASSERT(false); }

TileOperand split_columns(const at::Tensor&, at::Tensor&) { TORCH_INTERNAL_ASSERT(false); }

void multiply_split_out(at::Tensor&, const TileOperand&, const TileOperand&, at::Tensor&) {
  TORCH_INTERNAL_ASSERT(false);
}
#endif

}  // namespace torchium::linalg::detail
