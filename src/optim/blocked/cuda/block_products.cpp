#ifdef TORCHIUM_WITH_CUDA
#include "optim/blocked/cuda/block_products.h"

#include "cuda_kernels/split_gemm/batched_product.h"
#include "optim/core/cuda/kernel_tables.h"
#include "optim/core/cuda/kernel_tensors.h"
#include "support/phase.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>

namespace torchium::optim::detail {

using cuda_kernels::BatchedProduct;
using cuda_kernels::ProductKind;
using cuda_kernels::SplitEntry;

namespace {

using SplitTables = KernelTables<SplitEntry>;

void split(const SplitTables& tables, cudaStream_t stream) {
  for (const auto& table : tables) {
    C10_CUDA_CHECK(cuda_kernels::split_fp16(table, stream));
  }
}

}  // namespace

// Memory for the operands of one part: as fp16 numbers, and the largest magnitude and scale of
// each.
class BlockProducts::PartOperands {
 public:
  PartOperands(int64_t elements, int64_t operands, bool is_single, const at::TensorOptions& options)
      : has_low_(!is_single),
        split_(at::empty({has_low_ ? 2 : 1, elements}, options.dtype(at::kHalf))),
        numbers_(at::empty({2, operands}, options)) {}

  // Before the first part.
  void clear(cudaStream_t stream) const {
    C10_CUDA_CHECK(cudaMemsetAsync(numbers_.mutable_data_ptr<float>(), 0,
                                   numbers_.size(1) * sizeof(unsigned), stream));
  }
  // Operands of earlier parts are no longer needed.
  void begin_part() { used_ = 0; }

  // Where x, [matrices, rows, columns], will be split to.
  SplitEntry take(const void* x, cuda_kernels::ElementType type, int64_t matrices, int64_t rows,
                  int64_t columns) {
    auto* hi = reinterpret_cast<__half*>(split_.mutable_data_ptr<at::Half>()) + used_;
    auto* numbers = numbers_.mutable_data_ptr<float>() + operand_++;
    // The 8 bits of bfloat16 need no lo.
    const bool has_low = has_low_ && type == cuda_kernels::ElementType::kFloat;
    used_ += matrices * rows * columns;  // a multiple of 64: sizes are those of the kernel
    return {.x = x,
            .split = {hi, has_low ? hi + split_.size(1) : nullptr, numbers + numbers_.size(1),
                      static_cast<int>(rows), static_cast<int>(columns), /*has_scales=*/false},
            .largest = reinterpret_cast<unsigned*>(numbers),
            .matrices = static_cast<int>(matrices),
            .first_tile = 0,
            .type = type};
  }

 private:
  bool has_low_;
  at::Tensor split_;    // [1 or 2, elements]: hi, lo
  at::Tensor numbers_;  // [2, operands]: largest magnitudes as bits, scales
  int64_t used_ = 0, operand_ = 0;
};

void BlockProducts::update_statistics(const cuda_kernels::StepControl* control) const {
  std::vector<BatchedProduct> products[2];
  for (size_t b = 0; b < batches_.size(); ++b) {
    const MatrixBatch& batch = batches_[b];
    for (size_t mode = 0; mode < batch.sizes.size(); ++mode) {
      at::Tensor statistics = batch.statistics[mode];
      if (workspace_.is_split(b)) {
        products[mode].push_back({.A = workspace_.split_gradient(b),
                                  .B = {},
                                  .C = statistics.mutable_data_ptr<float>(),
                                  .matrices = batch.count});
      } else {
        gram_update_(statistics, workspace_.gradient(b), /*transposed=*/mode == 1,
                     &control->update.alpha, &control->update.beta, precision_);
      }
    }
  }
  for (const int mode : {0, 1}) {
    const auto kind = mode == 0 ? ProductKind::kRowGram : ProductKind::kColumnGram;
    const auto count = static_cast<int>(products[mode].size());
    const auto done = cuda_kernels::work_of(kind, products[mode].data(), count, is_single());
    const torchium::detail::KernelWork work(done.flops, done.bytes);
    C10_CUDA_CHECK(cuda_kernels::batched_products(kind, products[mode].data(), count,
                                                  &control->update, is_single(), stream_));
  }
}

std::vector<std::vector<BlockProducts::Piece>> BlockProducts::split_parts(
    const std::vector<Piece>& blocks) const {
  std::vector<std::vector<Piece>> parts;
  int64_t room = 0;
  for (const auto& [b, first, all] : blocks) {
    if (!workspace_.is_split(b)) {
      continue;
    }
    const int64_t elements = operand_elements(batches_[b].sizes);
    for (int64_t start = first; start < first + all;) {
      if (parts.empty() || room < elements) {
        parts.emplace_back();
        room = std::max(kOperandsInFlight, elements);
      }
      const int64_t count = std::min(first + all - start, room / elements);
      parts.back().push_back({b, start, count});
      start += count;
      room -= count * elements;
    }
  }
  return parts;
}

void BlockProducts::precondition(const std::vector<Piece>& blocks) const {
  const auto parts = split_parts(blocks);
  if (!parts.empty()) {
    int64_t elements = 0, pieces = 0;
    for (const auto& part : parts) {
      int64_t of_part = 0;
      for (const auto& [b, start, count] : part) {
        of_part += count * operand_elements(batches_[b].sizes);
      }
      elements = std::max(elements, of_part);
      pieces += static_cast<int64_t>(part.size());
    }
    const auto options = batches_[parts[0][0].batch].statistics[0].options();
    PartOperands operands(elements, 3 * pieces, is_single(), options);
    operands.clear(stream_);
    for (const auto& part : parts) {
      precondition_part(part, operands);
    }
  }
  for (const Piece& piece : blocks) {
    if (!workspace_.is_split(piece.batch)) {
      precondition_floats(piece);
    }
  }
}

// R_1 m lies in the memory of the directions until it is split.
void BlockProducts::precondition_part(const std::vector<Piece>& part,
                                      PartOperands& operands) const {
  SplitTables by_matrix, roots, between;
  std::vector<BatchedProduct> first, second;
  const auto add = [](SplitTables& tables, const SplitEntry& entry) {
    const int64_t elements = int64_t{entry.matrices} * entry.split.rows * entry.split.columns;
    tables.add(entry, static_cast<int>((elements + cuda_kernels::kSplitTile - 1) /
                                       cuda_kernels::kSplitTile));
    return entry.split;
  };
  operands.begin_part();
  for (const auto& [b, start, count] : part) {
    const MatrixBatch& batch = batches_[b];
    const auto root = [&](size_t mode) {
      const at::Tensor& all = batch.roots[mode];
      const int64_t n = batch.sizes[mode];
      const auto* data = static_cast<const char*>(all.const_data_ptr());
      const SplitEntry entry = operands.take(data + start * n * n * all.element_size(),
                                             element_type(all.scalar_type()), count, n, n);
      by_matrix.add(entry, entry.matrices);
      return add(roots, entry);
    };
    float* direction = workspace_.direction_floats(b, start);
    const SplitEntry left = operands.take(direction, cuda_kernels::ElementType::kFloat, count,
                                          batch.sizes[0], batch.sizes[1]);
    first.push_back({.A = root(0),
                     .B = workspace_.split_average(b, start),
                     .C = direction,
                     .matrices = count,
                     .largest = left.largest});
    second.push_back({.A = add(between, left), .B = root(1), .C = direction, .matrices = count});
  }
  for (const auto& table : by_matrix) {
    C10_CUDA_CHECK(cuda_kernels::find_largest_on_diagonals(table, stream_));
  }
  split(roots, stream_);
  const auto multiply = [&](ProductKind kind, const std::vector<BatchedProduct>& products) {
    const auto count = static_cast<int>(products.size());
    const auto done = cuda_kernels::work_of(kind, products.data(), count, is_single());
    const torchium::detail::KernelWork work(done.flops, done.bytes);
    C10_CUDA_CHECK(cuda_kernels::batched_products(kind, products.data(), count, nullptr,
                                                  is_single(), stream_));
  };
  multiply(ProductKind::kGeneral, first);  // R_1 m
  split(between, stream_);
  multiply(ProductKind::kBySymmetric, second);  // R_1 m R_2
}

void BlockProducts::precondition_floats(const Piece& blocks) const {
  const auto [b, first, all] = blocks;
  const MatrixBatch& batch = batches_[b];
  const bool is_vector = batch.sizes.size() == 1;
  const int64_t at_once = std::max<int64_t>(1, kOperandsInFlight / operand_elements(batch.sizes));
  for (int64_t start = first; start < first + all; start += at_once) {
    const int64_t count = std::min(at_once, first + all - start);
    const auto root = [&](size_t mode) {
      return batch.roots[mode].narrow(0, start, count).to(at::kFloat);
    };
    at::Tensor direction = workspace_.direction(b).narrow(0, start, count);
    at::Tensor left = is_vector ? direction : at::empty_like(direction);
    multiply_batches_out(left, root(0), workspace_.average(b).narrow(0, start, count), precision_);
    if (!is_vector) {
      multiply_batches_out(direction, left, root(1), precision_);
    }
  }
}

}  // namespace torchium::optim::detail
#endif
