#include "optim/blocked/block_storage.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <map>
#include <tuple>

namespace torchium::optim::detail {
namespace {

// Whether `next` directly follows the `count` matrices that begin at `first`.
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

// The tensors of one slot.
struct SlotKind {
  std::vector<at::Tensor> MatrixBatch::*of_batch;
  std::vector<at::Tensor> ParameterState::*of_param;
};
constexpr SlotKind kSlotKinds[] = {{&MatrixBatch::statistics, &ParameterState::statistics},
                                   {&MatrixBatch::roots, &ParameterState::roots},
                                   {&MatrixBatch::root_failures, &ParameterState::root_failures}};

// Whether the matrices of one block shape, whose first slot is `first_slot`, continue a batch.
bool continues(const MatrixBatch& batch, const ParameterState& state, size_t first_slot) {
  for (const SlotKind& kind : kSlotKinds) {
    for (size_t mode = 0; mode < batch.sizes.size(); ++mode) {
      if (!continues((batch.*kind.of_batch)[mode], batch.count,
                     (state.*kind.of_param)[first_slot + mode])) {
        return false;
      }
    }
  }
  return true;
}

MatrixBatch open_batch(const BlockShape& shape, const ParameterState& state, size_t first_slot) {
  MatrixBatch batch{shape.sizes, {}, 0, {}, {}, {}};
  for (const SlotKind& kind : kSlotKinds) {
    const auto first = (state.*kind.of_param).begin() + static_cast<std::ptrdiff_t>(first_slot);
    (batch.*kind.of_batch).assign(first, first + static_cast<std::ptrdiff_t>(shape.sizes.size()));
  }
  return batch;
}

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
  const at::AutoDispatchBelowADInplaceOrView untracked;  // autograd's views take longer to make
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

BlockStorage make_block_storage(at::TensorList params, const std::vector<Blocking>& blockings,
                                const std::optional<std::string>& root_dtype) {
  // The modes 0, 1, ... of one block shape on one device have the buffers first, first + 1, ...
  struct Shape {
    int64_t first_buffer;
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
        const int64_t buffer = found->second.first_buffer + static_cast<int64_t>(mode);
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
    result.roots.push_back(identities(count, n, of_roots));
    result.root_failures.push_back(at::zeros({count}, options.dtype(at::kInt)));
  }
  return result;
}

std::vector<MatrixBatch> find_batches(const std::vector<Blocking>& blockings,
                                      const StateList& states, const std::vector<size_t>& members) {
  std::vector<MatrixBatch> batches;
  std::map<std::vector<int64_t>, size_t> open;  // block sizes -> the batch that may still grow
  for (const size_t i : members) {
    size_t slot = 0;
    for (const BlockShape& shape : blockings[i].shapes) {
      const auto [found, is_new] = open.try_emplace(shape.sizes, batches.size());
      if (is_new || !continues(batches[found->second], states[i], slot)) {
        found->second = batches.size();
        batches.push_back(open_batch(shape, states[i], slot));
      }
      MatrixBatch& batch = batches[found->second];
      batch.entries.push_back({static_cast<int64_t>(i), &shape, batch.count});
      batch.count += shape.count();
      slot += shape.sizes.size();
    }
  }
  for (MatrixBatch& batch : batches) {
    for (const SlotKind& kind : kSlotKinds) {
      for (at::Tensor& tensor : batch.*kind.of_batch) {
        tensor = widen(tensor, batch.count);
      }
    }
  }
  return batches;
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
