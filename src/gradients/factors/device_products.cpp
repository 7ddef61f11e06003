#include "gradients/factors/device_products.h"

#ifdef TORCHIUM_WITH_CUDA
#include "cuda_kernels/split_gemm/batched_product.h"
#include "support/alignment.h"
#include "support/phase.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>

namespace torchium::gradients::detail {
namespace {

using cuda_kernels::SplitFp16;

// Multiplications below which a split and a sum of parts take longer than a product in float32.
constexpr int64_t kLeastMultiplications = int64_t{1} << 31;
constexpr int64_t kLeastVector = 256;
constexpr int64_t kTile = 128, kTilesInFlight = 264;  // of a Gram matrix
constexpr int64_t kLeastRows = 512;                   // of a part

// The parts of the rows of X [count, vector], which fill the last matrix up with zeros.
void split_rows(const at::Tensor& X, const SplitFp16& split) {
  const at::Tensor largest =
      at::linalg_vector_norm(X, std::numeric_limits<double>::infinity()).view({1});
  cuda_kernels::Table<cuda_kernels::SplitEntry> table;
  table.count = 1;
  table.end_tile = as_int((X.numel() + cuda_kernels::kSplitTile - 1) / cuda_kernels::kSplitTile);
  table.entries[0] = {.x = X.const_data_ptr<float>(),
                      .split = split,
                      .largest = reinterpret_cast<unsigned*>(largest.mutable_data_ptr<float>()),
                      .matrices = 1,
                      .first_tile = 0,
                      .type = cuda_kernels::ElementType::kFloat};
  table.entries[0].split.rows = as_int(X.size(0));
  C10_CUDA_CHECK(cuda_kernels::split_fp16(table, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace

bool has_gram_of_rows(const at::Tensor& X) {
  const cudaDeviceProp* device = at::cuda::getCurrentDeviceProperties();
  const int64_t n = X.size(1);
  return X.scalar_type() == at::kFloat && X.size(0) == 1 && X.stride(1) == 1 && X.stride(2) == n &&
         n % 8 == 0 && n >= kLeastVector && torchium::detail::is_aligned(X) &&
         n * n / kLeastVector * X.size(2) >= kLeastMultiplications / kLeastVector &&
         X.size(2) < std::numeric_limits<int>::max() &&
         cuda_kernels::has_batched_product(device->major, device->minor,
                                           static_cast<int>(device->sharedMemPerBlockOptin));
}

// Parts of the rows have products of their own, which are added.
at::Tensor gram_of_rows(const at::Tensor& X) {
  const int64_t n = X.size(1), count = X.size(2);
  const int64_t side = (n + kTile - 1) / kTile, tiles = side * (side + 1) / 2;
  const int64_t parts = std::clamp<int64_t>((kTilesInFlight + tiles - 1) / tiles, 1,
                                            std::max<int64_t>(1, count / kLeastRows));
  const int64_t rows = (count + parts - 1) / parts;
  const at::Tensor hi_and_lo = at::empty({2, parts * rows, n}, X.options().dtype(at::kHalf));
  hi_and_lo.narrow(1, count, parts * rows - count).zero_();
  const at::Tensor scale = at::empty({1}, X.options());
  auto* hi = reinterpret_cast<__half*>(hi_and_lo.mutable_data_ptr<at::Half>());
  const SplitFp16 split{.hi = hi,
                        .lo = hi + parts * rows * n,
                        .scale = scale.mutable_data_ptr<float>(),
                        .rows = as_int(rows),
                        .columns = as_int(n),
                        .has_scales = false};
  split_rows(X[0].mT(), split);
  at::Tensor alpha_and_beta = at::ones({2}, X.options());
  alpha_and_beta[1].zero_();
  const at::Tensor products = at::zeros({parts, n, n}, X.options());
  const cuda_kernels::BatchedProduct product{
      .A = split, .B = {}, .C = products.mutable_data_ptr<float>(), .matrices = parts};
  constexpr auto kKind = cuda_kernels::ProductKind::kColumnGram;
  const auto done = cuda_kernels::work_of(kKind, &product, 1, /*single=*/false);
  const torchium::detail::KernelWork work(done.flops, done.bytes);
  C10_CUDA_CHECK(cuda_kernels::batched_products(
      kKind, &product, 1,
      reinterpret_cast<const cuda_kernels::GramUpdate*>(alpha_and_beta.mutable_data_ptr<float>()),
      /*single=*/false, c10::cuda::getCurrentCUDAStream()));
  return parts == 1 ? products : products.sum(0, /*keepdim=*/true);
}

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
