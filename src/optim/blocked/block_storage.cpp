#include "optim/blocked/block_storage.h"

#include <ATen/ATen.h>

#include <map>
#include <tuple>
#include <utility>

namespace torchium::optim::detail {
namespace {

// Whether `next` lies directly behind the `count` matrices that begin at `first`.
bool continues(const at::Tensor& first, int64_t count, const at::Tensor& next) {
  const int64_t matrix_numel = next.numel() / std::max<int64_t>(next.size(0), 1);
  return first.is_alias_of(next) &&
         next.storage_offset() == first.storage_offset() + count * matrix_numel &&
         first.scalar_type() == next.scalar_type();
}

// The `count` matrices that begin at `first`, as one tensor.
at::Tensor widen(const at::Tensor& first, int64_t count) {
  if (first.size(0) == count) {
    return first;
  }
  std::vector<int64_t> sizes = first.sizes().vec();
  sizes[0] = count;
  return first.as_strided(sizes, first.strides(), first.storage_offset());
}

void check_slot(const at::Tensor& slot, const std::vector<int64_t>& expected, const char* name) {
  TORCH_CHECK_VALUE(slot.sizes() == at::IntArrayRef(expected) && slot.is_contiguous(), name,
                    ": a slot has shape ", slot.sizes(), " but the parameter's blocks need ",
                    expected, " (contiguous)");
}

// Adds the slots of one block shape to a batch that they continue, or opens a new batch.
class BatchFinder {
 public:
  explicit BatchFinder(const SlotViews& slots) : slots_(slots) {}

  void add(int64_t param, bool flag, const BlockShape& shape, size_t first_slot) {
    const int64_t count = shape.count();
    for (size_t mode = 0; mode < shape.sizes.size(); ++mode) {
      const int64_t n = shape.sizes[mode];
      check_slot(slots_.statistics[first_slot + mode], {count, n, n}, "statistics");
      check_slot(slots_.roots[first_slot + mode], {count, n, n}, "roots");
      check_slot(slots_.root_failures[first_slot + mode], {count}, "root_failures");
    }
    auto [open, is_new] = open_.try_emplace({shape.sizes, flag}, batches_.size());
    if (!is_new && !batch_continues(batches_[open->second], first_slot)) {
      open->second = batches_.size();
      is_new = true;
    }
    if (is_new) {
      MatrixBatch batch{shape.sizes, {}, 0, {}, {}, {}};
      for (size_t mode = 0; mode < shape.sizes.size(); ++mode) {
        batch.statistics.push_back(slots_.statistics[first_slot + mode]);
        batch.roots.push_back(slots_.roots[first_slot + mode]);
        batch.root_failures.push_back(slots_.root_failures[first_slot + mode]);
      }
      batches_.push_back(std::move(batch));
    }
    MatrixBatch& batch = batches_[open->second];
    batch.entries.push_back({param, &shape, batch.count});
    batch.count += count;
  }

  std::vector<MatrixBatch> finish() {
    for (auto& batch : batches_) {
      for (size_t mode = 0; mode < batch.sizes.size(); ++mode) {
        batch.statistics[mode] = widen(batch.statistics[mode], batch.count);
        batch.roots[mode] = widen(batch.roots[mode], batch.count);
        batch.root_failures[mode] = widen(batch.root_failures[mode], batch.count);
      }
    }
    return std::move(batches_);
  }

 private:
  bool batch_continues(const MatrixBatch& batch, size_t first_slot) const {
    for (size_t mode = 0; mode < batch.sizes.size(); ++mode) {
      if (!continues(batch.statistics[mode], batch.count, slots_.statistics[first_slot + mode]) ||
          !continues(batch.roots[mode], batch.count, slots_.roots[first_slot + mode]) ||
          !continues(batch.root_failures[mode], batch.count,
                     slots_.root_failures[first_slot + mode])) {
        return false;
      }
    }
    return true;
  }

  const SlotViews& slots_;
  std::vector<MatrixBatch> batches_;
  // Block sizes and flag -> the batch that may still grow.
  std::map<std::pair<std::vector<int64_t>, bool>, size_t> open_;
};

// The part of `blocks` [count, sizes...] that belongs to one entry, as [counts..., sizes...].
at::Tensor entry_view(const at::Tensor& blocks, const MatrixBatch::Entry& entry) {
  std::vector<int64_t> sizes = entry.shape->counts;
  sizes.insert(sizes.end(), entry.shape->sizes.begin(), entry.shape->sizes.end());
  return blocks.narrow(0, entry.start, entry.shape->count()).view(sizes);
}

std::vector<int64_t> batch_sizes(const MatrixBatch& batch) {
  std::vector<int64_t> sizes{batch.count};
  sizes.insert(sizes.end(), batch.sizes.begin(), batch.sizes.end());
  return sizes;
}

// Whether a batch is the single block of a single parameter, so that nothing needs packing.
bool is_one_parameter(const MatrixBatch& batch, const std::vector<Blocking>& blockings) {
  return batch.count == 1 && blockings[batch.entries.front().param].is_one_block();
}

// The block of a parameter that is one block, in the parameter's shape.
at::Tensor whole_block(const at::Tensor& blocks, const MatrixBatch::Entry& entry,
                       const at::Tensor& param) {
  const auto strides = c10::contiguous_strides(param.sizes());
  return blocks.as_strided(param.sizes(), strides,
                           blocks.storage_offset() + entry.start * param.numel());
}

}  // namespace

int64_t operand_elements(const std::vector<int64_t>& sizes) {
  int64_t elements = c10::multiply_integers(sizes);
  for (const int64_t n : sizes) {
    elements += n * n;
  }
  return elements;
}

at::ScalarType state_dtype(const at::Tensor& param) {
  return param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

BlockStorage make_block_storage(at::TensorList params, const std::vector<Blocking>& blockings,
                                const std::optional<std::string>& root_dtype) {
  // Joined s serves the modes of one block shape on one device: s, s + 1, ... for modes 0, 1, ...
  struct Shape {
    int64_t first_stack;
    int64_t count;
  };
  std::map<std::tuple<std::vector<int64_t>, std::string, at::ScalarType>, Shape> shapes;
  std::vector<std::tuple<int64_t, at::Tensor, int64_t>> storage;  // n, a parameter, matrices
  BlockStorage result;
  for (size_t p = 0; p < params.size(); ++p) {
    int64_t slot = 0;
    for (const auto& shape : blockings[p].shapes) {
      auto [found, is_new] =
          shapes.try_emplace({shape.sizes, params[p].device().str(), state_dtype(params[p])},
                             Shape{static_cast<int64_t>(storage.size()), 0});
      if (is_new) {
        for (const int64_t n : shape.sizes) {
          storage.emplace_back(n, params[p], 0);
        }
      }
      const int64_t count = shape.count();
      for (size_t mode = 0; mode < shape.sizes.size(); ++mode, ++slot) {
        const int64_t buffer = found->second.first_stack + static_cast<int64_t>(mode);
        result.layout.push_back(
            {static_cast<int64_t>(p), slot, buffer, found->second.count, count});
        std::get<2>(storage[buffer]) += count;
      }
      found->second.count += count;
    }
  }
  for (const auto& [n, param, count] : storage) {
    const auto options = at::TensorOptions().device(param.device()).dtype(state_dtype(param));
    result.statistics.push_back(at::zeros({count, n, n}, options));
    const auto of_roots = root_dtype.has_value() ? options.dtype(at::kBFloat16) : options;
    result.roots.push_back(at::eye(n, of_roots).expand({count, n, n}).contiguous());
    result.root_failures.push_back(at::zeros({count}, options.dtype(at::kInt)));
  }
  return result;
}

std::vector<MatrixBatch> find_batches(const std::vector<Blocking>& blockings,
                                      const SlotViews& slots, const std::vector<bool>& flags) {
  size_t expected = 0;
  for (const auto& blocking : blockings) {
    expected += blocking.shapes.size() * blocking.dims.size();
  }
  TORCH_CHECK_VALUE(slots.statistics.size() == expected && slots.roots.size() == expected &&
                        slots.root_failures.size() == expected,
                    "statistics, roots and root_failures have ", slots.statistics.size(), ", ",
                    slots.roots.size(), " and ", slots.root_failures.size(),
                    " slots but the parameters have ", expected);
  BatchFinder finder(slots);
  size_t slot = 0;
  for (size_t p = 0; p < blockings.size(); ++p) {
    for (const auto& shape : blockings[p].shapes) {
      finder.add(static_cast<int64_t>(p), !flags.empty() && flags[p], shape, slot);
      slot += shape.sizes.size();
    }
  }
  return finder.finish();
}

at::Tensor set_aside_blocks(const MatrixBatch& batch, const std::vector<Blocking>& blockings,
                            at::TensorList params, std::vector<at::Tensor>& tensors) {
  const at::Tensor& first = params[batch.entries.front().param];
  if (is_one_parameter(batch, blockings)) {
    return {};
  }
  at::Tensor blocks = at::empty(batch_sizes(batch), first.options().dtype(state_dtype(first)));
  for (const auto& entry : batch.entries) {
    if (blockings[entry.param].is_one_block()) {
      tensors[entry.param] = whole_block(blocks, entry, params[entry.param]);
    }
  }
  return blocks;
}

at::Tensor pack(const MatrixBatch& batch, const std::vector<Blocking>& blockings,
                const std::vector<at::Tensor>& tensors, at::Tensor blocks) {
  const at::Tensor& first = tensors[batch.entries.front().param];
  if (is_one_parameter(batch, blockings)) {
    return first.contiguous().view(batch_sizes(batch));
  }
  if (!blocks.defined()) {
    blocks = at::empty(batch_sizes(batch), first.options());
  }
  const int64_t block_numel = blocks.numel() / std::max<int64_t>(batch.count, 1);
  for (const auto& entry : batch.entries) {
    const at::Tensor& tensor = tensors[entry.param];
    const int64_t offset = blocks.storage_offset() + entry.start * block_numel;
    if (tensor.is_alias_of(blocks) && tensor.storage_offset() == offset) {
      continue;  // written in place
    }
    entry_view(blocks, entry)
        .copy_(block_view(tensor.contiguous(), blockings[entry.param], *entry.shape));
  }
  return blocks;
}

void unpack(const MatrixBatch& batch, const std::vector<Blocking>& blockings,
            const at::Tensor& maybe_strided, at::TensorList params,
            std::vector<at::Tensor>& tensors) {
  const at::Tensor blocks = maybe_strided.contiguous();
  for (const auto& entry : batch.entries) {
    const auto& blocking = blockings[entry.param];
    at::Tensor& target = tensors[entry.param];
    if (blocking.is_one_block()) {
      target = whole_block(blocks, entry, params[entry.param]);
      continue;
    }
    if (!target.defined()) {
      target = at::empty(params[entry.param].sizes(), blocks.options());
    }
    block_view(target, blocking, *entry.shape).copy_(entry_view(blocks, entry));
  }
}

}  // namespace torchium::optim::detail
