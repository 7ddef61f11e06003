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
  root_places_.push_back(root_places_.back() +
                         layer.groups * (layer.rows * layer.rows + layer.pitch * layer.pitch));
  return layers_.size() - 1;
}

void SplitProducts::finish(const at::TensorOptions& options, bool may_keep) {
  if (empty()) {
    return;
  }
  numbers_ = at::empty({2, static_cast<int64_t>(layers_.size()), kOperands}, options);
  const auto memory = static_cast<double>(at::cuda::getCurrentDeviceProperties()->totalGlobalMem);
  may_keep_ = may_keep && 4.0 * static_cast<double>(root_places_.back()) <= kShareOfDevice * memory;
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

at::Tensor SplitProducts::parts_of(int64_t elements, bool single) const {
  return at::empty({single ? 1 : 2, elements}, numbers_.options().dtype(at::kHalf));
}

SplitEntry SplitProducts::entry(size_t layer, Operand operand, const float* x,
                                const at::Tensor& parts, int64_t place) const {
  const SplitLayer& its = layers_[layer];
  const bool is_right = operand == kRight;
  auto* hi = reinterpret_cast<__half*>(parts.mutable_data_ptr<at::Half>()) + place;
  SplitEntry result{.x = x,
                    .split = {hi, parts.size(0) == 1 ? nullptr : hi + parts.stride(0),
                              number(layers_.size() + layer, operand),
                              static_cast<int>(is_right ? its.pitch : its.rows),
                              static_cast<int>(operand == kLeft ? its.rows : its.pitch),
                              /*has_scales=*/false},
                    .largest = reinterpret_cast<unsigned*>(number(layer, operand)),
                    .matrices = static_cast<int>(its.groups),
                    .first_tile = 0,
                    .type = cuda_kernels::ElementType::kFloat};
  result.order = is_right && its.columns != its.pitch ? static_cast<int>(its.columns) : 0;
  return result;
}

namespace {

void add_split(KernelTables<SplitEntry>& tables, const SplitEntry& entry) {
  const int64_t elements = entry.matrices * int64_t{entry.split.rows} * entry.split.columns;
  tables.add(entry, static_cast<int>((elements + cuda_kernels::kSplitTile - 1) /
                                     cuda_kernels::kSplitTile));
}

void split_all(const KernelTables<SplitEntry>& tables) {
  for (const auto& table : tables) {
    C10_CUDA_CHECK(cuda_kernels::split_fp16(table, stream()));
  }
}

}  // namespace

// Into `roots`, from the place of the first of these layers on.
void SplitProducts::split_roots(size_t begin, size_t end, const at::Tensor& roots) const {
  KernelTables<SplitEntry> diagonals, all;
  for (size_t i = begin; i < end; ++i) {
    const SplitLayer& layer = layers_[i];
    const int64_t place = root_places_[i] - root_places_[begin];
    for (const SplitEntry& root :
         {entry(i, kLeft, layer.left, roots, place),
          entry(i, kRight, layer.right, roots, place + layer.groups * layer.rows * layer.rows)}) {
      diagonals.add(root, root.matrices);
      add_split(all, root);
    }
  }
  for (const auto& table : diagonals) {
    C10_CUDA_CHECK(cuda_kernels::find_largest_on_diagonals(table, stream()));
  }
  split_all(all);
}

bool SplitProducts::has_kept(bool single) const {
  return kept_.defined() && (kept_.size(0) == 1) == single;
}

bool SplitProducts::add_to(GraphKey& key, bool single, std::optional<int64_t> versions) const {
  if (empty()) {
    return true;
  }
  const bool is_kept = has_kept(single);
  add_bytes(key, is_kept ? kept_.const_data_ptr() : nullptr);
  return !may_keep_ || !versions || (is_kept && kept_versions_ == versions);
}

// Whether kept_ has the parts of the roots.
bool SplitProducts::keep_roots(bool single, std::optional<int64_t> versions) {
  const bool is_kept = has_kept(single);
  if (!may_keep_ || !versions) {
    kept_ = at::Tensor();
    return false;
  }
  if (!is_kept) {
    kept_ = parts_of(root_places_.back(), single);
  }
  if (!is_kept || kept_versions_ != versions) {
    split_roots(0, layers_.size(), kept_);
    kept_versions_ = versions;
  }
  return true;
}

void SplitProducts::run(const cuda_kernels::KfacBuffers& buffers, bool single,
                        std::optional<int64_t> versions) {
  if (empty()) {
    return;
  }
  const bool is_kept = keep_roots(single, versions);
  size_t begin = 0;
  while (begin < layers_.size()) {
    const auto elements = [&](size_t i) {
      const int64_t roots = is_kept ? 0 : root_places_[i + 1] - root_places_[i];
      return roots + layers_[i].groups * layers_[i].rows * layers_[i].pitch;
    };
    size_t end = begin + 1;
    for (int64_t used = elements(begin);
         end < layers_.size() && (used += elements(end)) <= kElementsInFlight; ++end) {
    }
    const at::Tensor roots =
        is_kept ? kept_.narrow(1, root_places_[begin], root_places_[end] - root_places_[begin])
                : parts_of(root_places_[end] - root_places_[begin], single);
    if (!is_kept) {
      split_roots(begin, end, roots);
    }
    multiply(begin, end, roots, buffers);
    begin = end;
  }
}

// The parts of V and of left V share their memory.
void SplitProducts::multiply(size_t begin, size_t end, const at::Tensor& roots,
                             const cuda_kernels::KfacBuffers& buffers) const {
  const bool single = roots.size(0) == 1;
  int64_t elements = 0;
  for (size_t i = begin; i < end; ++i) {
    elements += layers_[i].groups * layers_[i].rows * layers_[i].pitch;
  }
  const at::Tensor parts = parts_of(elements, single);
  KernelTables<SplitEntry> before, between;
  std::vector<BatchedProduct> first, second;
  int64_t used = 0;
  for (size_t i = begin; i < end; ++i) {
    const SplitLayer& layer = layers_[i];
    const int64_t place = root_places_[i] - root_places_[begin];
    const SplitEntry left = entry(i, kLeft, layer.left, roots, place);
    const SplitEntry right =
        entry(i, kRight, layer.right, roots, place + layer.groups * layer.rows * layer.rows);
    const SplitEntry V = entry(i, kV, buffers.first + layer.start, parts, used);
    const SplitEntry product = entry(i, kProduct, buffers.second + layer.start, parts, used);
    used += layer.groups * layer.rows * layer.pitch;
    add_split(before, V);
    add_split(between, product);
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
  const auto multiply_all = [&](ProductKind kind, const std::vector<BatchedProduct>& products) {
    const auto count = static_cast<int>(products.size());
    const auto done = cuda_kernels::work_of(kind, products.data(), count, single);
    const torchium::detail::KernelWork work(done.flops, done.bytes);
    C10_CUDA_CHECK(
        cuda_kernels::batched_products(kind, products.data(), count, nullptr, single, stream()));
  };
  split_all(before);
  multiply_all(ProductKind::kGeneral, first);
  split_all(between);
  multiply_all(ProductKind::kBySymmetric, second);
}

}  // namespace torchium::optim::detail
#endif
