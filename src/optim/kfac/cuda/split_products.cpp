#ifdef TORCHIUM_WITH_CUDA
#include "optim/kfac/cuda/split_products.h"

#include "cuda_kernels/split_gemm/batched_product.h"
#include "optim/core/cuda/kernel_tables.h"
#include "support/phase.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

namespace torchium::optim::detail {

using cuda_kernels::BatchedProduct;
using cuda_kernels::ProductKind;
using cuda_kernels::SplitEntry;
using cuda_kernels::SplitFp16;

namespace {

constexpr int64_t kLeastOrder = 32;  // below it most of a tile is empty
// Elements of the operands that are split at a time, 4 bytes each.
constexpr int64_t kElementsInFlight = int64_t{1} << 26;

cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream(); }

}  // namespace

bool has_split_products(int64_t rows, int64_t columns) {
  const cudaDeviceProp* device = at::cuda::getCurrentDeviceProperties();
  return std::min(rows, columns) >= kLeastOrder &&
         cuda_kernels::fits_batched_product(rows, split_pitch(columns)) &&
         cuda_kernels::has_batched_product(device->major, device->minor,
                                           static_cast<int>(device->sharedMemPerBlockOptin));
}

int64_t split_pitch(int64_t columns) { return (columns + 7) / 8 * 8; }

size_t SplitProducts::add(const SplitLayer& layer) {
  layers_.push_back(layer);
  return layers_.size() - 1;
}

void SplitProducts::finish(const at::TensorOptions& options) {
  if (!empty()) {
    numbers_ = at::empty({2, static_cast<int64_t>(layers_.size()), kOperands}, options);
  }
}

float* SplitProducts::number(size_t layer, Operand operand) const {
  return numbers_.mutable_data_ptr<float>() + layer * kOperands + operand;
}

unsigned* SplitProducts::largest(size_t layer) const {
  return reinterpret_cast<unsigned*>(number(layer, kV));
}

void SplitProducts::clear() const {
  if (!empty()) {
    C10_CUDA_CHECK(cudaMemsetAsync(numbers_.mutable_data_ptr<float>(), 0,
                                   layers_.size() * kOperands * sizeof(unsigned), stream()));
  }
}

// The parts of V and of left V share their memory.
int64_t SplitProducts::elements(const SplitLayer& layer) const {
  return layer.groups *
         (layer.rows * layer.rows + layer.rows * layer.pitch + layer.pitch * layer.pitch);
}

void SplitProducts::run(const cuda_kernels::KfacBuffers& buffers, bool single) const {
  std::vector<size_t> ends;
  int64_t most = 0, used = 0;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const int64_t its = elements(layers_[i]);
    if (used > 0 && used + its > kElementsInFlight) {
      ends.push_back(i);
      used = 0;
    }
    used += its;
    most = std::max(most, used);
  }
  if (empty()) {
    return;
  }
  ends.push_back(layers_.size());
  const at::Tensor parts =
      at::empty({single ? 1 : 2, most}, numbers_.options().dtype(at::kHalf));  // hi, lo
  size_t begin = 0;
  for (const size_t end : ends) {
    run_part(begin, end, parts, buffers, single);
    begin = end;
  }
}

void SplitProducts::run_part(size_t begin, size_t end, const at::Tensor& parts,
                             const cuda_kernels::KfacBuffers& buffers, bool single) const {
  KernelTables<SplitEntry> roots, before, between;
  std::vector<BatchedProduct> first, second;
  auto* hi = reinterpret_cast<__half*>(parts.mutable_data_ptr<at::Half>());
  int64_t used = 0;
  for (size_t i = begin; i < end; ++i) {
    const SplitLayer& layer = layers_[i];
    const auto entry_of = [&](Operand operand, const float* x, int64_t rows, int64_t columns) {
      return SplitEntry{.x = x,
                        .split = {hi + used, single ? nullptr : hi + used + parts.size(1),
                                  number(layers_.size() + i, operand), static_cast<int>(rows),
                                  static_cast<int>(columns), /*has_scales=*/false},
                        .largest = reinterpret_cast<unsigned*>(number(i, operand)),
                        .matrices = static_cast<int>(layer.groups),
                        .first_tile = 0,
                        .type = cuda_kernels::ElementType::kFloat};
    };
    const auto take = [&](KernelTables<SplitEntry>& tables, const SplitEntry& entry) {
      const int64_t elements = entry.matrices * int64_t{entry.split.rows} * entry.split.columns;
      tables.add(entry, static_cast<int>((elements + cuda_kernels::kSplitTile - 1) /
                                         cuda_kernels::kSplitTile));
      return elements;
    };
    const SplitEntry left = entry_of(kLeft, layer.left, layer.rows, layer.rows);
    roots.add(left, left.matrices);
    used += take(before, left);
    SplitEntry right = entry_of(kRight, layer.right, layer.pitch, layer.pitch);
    right.order = layer.columns == layer.pitch ? 0 : static_cast<int>(layer.columns);
    roots.add(right, right.matrices);
    used += take(before, right);
    const SplitEntry V = entry_of(kV, buffers.first + layer.start, layer.rows, layer.pitch);
    take(before, V);
    const SplitEntry product =
        entry_of(kProduct, buffers.second + layer.start, layer.rows, layer.pitch);
    used += take(between, product);
    first.push_back({.A = left.split,
                     .B = V.split,
                     .C = buffers.second + layer.start,
                     .matrices = layer.groups,
                     .largest = product.largest});
    second.push_back({.A = product.split,
                      .B = right.split,
                      .C = buffers.first + layer.start,
                      .matrices = layer.groups});
  }
  const auto split = [](const KernelTables<SplitEntry>& tables) {
    for (const auto& table : tables) {
      C10_CUDA_CHECK(cuda_kernels::split_fp16(table, stream()));
    }
  };
  const auto multiply = [&](ProductKind kind, const std::vector<BatchedProduct>& products) {
    const auto count = static_cast<int>(products.size());
    const auto done = cuda_kernels::work_of(kind, products.data(), count, single);
    const torchium::detail::KernelWork work(done.flops, done.bytes);
    C10_CUDA_CHECK(
        cuda_kernels::batched_products(kind, products.data(), count, nullptr, single, stream()));
  };
  for (const auto& table : roots) {
    C10_CUDA_CHECK(cuda_kernels::find_largest_on_diagonals(table, stream()));
  }
  split(before);
  multiply(ProductKind::kGeneral, first);
  split(between);
  multiply(ProductKind::kBySymmetric, second);
}

}  // namespace torchium::optim::detail
#endif
