#include "optim/sharing/shared_state.h"

#include "optim/core/seen_tensor.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <string>

namespace torchium::optim::detail {
namespace {

using Slots = std::vector<at::Tensor> ParameterState::*;
constexpr Slots kMatrixLists[] = {&ParameterState::statistics, &ParameterState::roots,
                                  &ParameterState::root_failures};
constexpr const char* kMatrixKeys[] = {"statistics", "roots", "root_failures"};

using Member = at::Tensor ParameterState::*;
constexpr Member kElementLists[] = {&ParameterState::diagonal, &ParameterState::exp_avg,
                                    &ParameterState::grafting_second_moment,
                                    &ParameterState::momentum_buffer, &ParameterState::sum};
constexpr const char* kElementKeys[] = {"diagonal", "exp_avg", "grafting_second_moment",
                                        "momentum_buffer", "sum"};

// The slots of the parameter, each with the order of its matrices and its blocks.
size_t slot_count(const SharedBlocks& shared) {
  size_t count = 0;
  for (const BlockShape& shape : shared.shapes) {
    count += shape.sizes.size();
  }
  return count;
}

// Calls visit(position in `own`, slot, row of the share) for each matrix of these blocks.
template <typename Visit>
void for_each_matrix(const SharedBlocks& shared, const std::vector<size_t>& own, Visit&& visit) {
  std::vector<int64_t> rows(slot_count(shared), 0);
  for (size_t k = 0; k < own.size(); ++k) {
    const distributed::Block& block = shared.blocks[own[k]];
    if (block.slot < 0) {
      continue;
    }
    for (size_t mode = 0; mode < block.rectangle.sizes.size(); ++mode) {
      const size_t slot = static_cast<size_t>(block.slot) + mode;
      visit(k, slot, mode, rows[slot]++);
    }
  }
}

int64_t element_count(const SharedBlocks& shared, const std::vector<size_t>& own) {
  int64_t count = 0;
  for (const size_t block : own) {
    count += shared.blocks[block].rectangle.numel();
  }
  return count;
}

// Whether `next` follows the elements [first, first + before) of one storage.
bool follows(const at::Tensor& first, int64_t before, const at::Tensor& next) {
  return next.is_contiguous() && next.is_alias_of(first) &&
         next.scalar_type() == first.scalar_type() &&
         next.storage_offset() == first.storage_offset() + before;
}

// `parts`, laid end to end: [elements] or [rows, ...]. A view where they are neighbours; else
// copied, and then the parts become views of it.
at::Tensor joined(const std::vector<at::Tensor*>& parts, std::vector<int64_t> sizes,
                  bool& has_changed) {
  const at::Tensor first = *parts.front();
  int64_t elements = 0;
  bool neighbours = true;
  for (const at::Tensor* part : parts) {
    neighbours = neighbours && follows(first, elements, *part);
    elements += part->numel();
  }
  if (neighbours) {
    return first.as_strided(sizes, c10::contiguous_strides(sizes), first.storage_offset());
  }
  has_changed = true;
  at::Tensor all = at::empty(sizes, first.options());
  int64_t at = 0;
  for (at::Tensor* part : parts) {
    at::Tensor view = all.view({-1}).narrow(0, at, part->numel()).view(part->sizes());
    view.copy_(*part);
    at += part->numel();
    *part = view;
  }
  return all;
}

// The tensor object so far, if it is of the same memory.
at::Tensor kept(const at::Tensor& before, at::Tensor now) {
  return before.defined() && SeenMemory(before).is_of(now) ? before : now;
}

// Of some blocks, end to end.
at::Tensor elements_of(const at::Tensor& whole, const SharedBlocks& shared,
                       const std::vector<size_t>& blocks) {
  at::Tensor elements = at::empty({element_count(shared, blocks)}, whole.options());
  int64_t at = 0;
  for (const size_t block : blocks) {
    const at::Tensor part = block_of(whole, shared, block);
    elements.narrow(0, at, part.numel()).view(part.sizes()).copy_(part);
    at += part.numel();
  }
  return elements;
}

}  // namespace

std::vector<size_t> blocks_of(const SharedBlocks& shared, int64_t rank) {
  std::vector<size_t> own;
  for (size_t b = 0; b < shared.blocks.size(); ++b) {
    if (shared.owners[b] == rank) {
      own.push_back(b);
    }
  }
  return own;
}

ParameterState share_of(const ParameterState& state, const SharedBlocks& shared, int64_t rank,
                        const std::string& name) {
  const std::vector<size_t> own = blocks_of(shared, rank);
  const auto refuse = [&](const std::string& key, const at::Tensor& tensor) {
    TORCH_CHECK_VALUE(false, "'", key, "' of ", name, " has shape ", tensor.sizes(),
                      ", which is neither the whole state nor the share of rank ", rank,
                      "; load a state dict, or delete its entry in the state of the optimizer to "
                      "start afresh");
  };
  ParameterState share = state;
  std::vector<std::vector<int64_t>> rows(slot_count(shared));  // in the whole state
  for_each_matrix(shared, own, [&](size_t k, size_t slot, size_t, int64_t) {
    rows[slot].push_back(shared.matrices[own[k]]);
  });
  std::vector<int64_t> counts;  // of each slot in the whole state
  for (const BlockShape& shape : shared.shapes) {
    counts.insert(counts.end(), shape.sizes.size(), shape.count());
  }
  for (size_t s = 0; s < std::size(kMatrixLists); ++s) {
    const Slots slots = kMatrixLists[s];
    if ((state.*slots).size() != rows.size()) {
      TORCH_CHECK_VALUE(false, "the state of ", name, " has ", (state.*slots).size(),
                        " lists of matrices, its blocks need ", rows.size(),
                        "; delete its entry in the state of the optimizer to start afresh");
    }
    for (size_t slot = 0; slot < rows.size(); ++slot) {
      at::Tensor& tensor = (share.*slots)[slot];
      if (tensor.size(0) == static_cast<int64_t>(rows[slot].size())) {
        continue;  // the share, or all blocks are this rank's
      }
      if (tensor.size(0) != counts[slot]) {
        refuse(std::string(kMatrixKeys[s]) + "." + std::to_string(slot), tensor);
      }
      tensor = tensor.index_select(0, at::tensor(rows[slot], at::kLong).to(tensor.device()));
    }
  }
  const int64_t elements = element_count(shared, own);
  for (size_t e = 0; e < std::size(kElementLists); ++e) {
    at::Tensor& tensor = share.*kElementLists[e];
    if (!tensor.defined() || tensor.sizes() == at::IntArrayRef({elements})) {
      continue;
    }
    if (tensor.sizes() != shared.whole.sizes()) {
      refuse(kElementKeys[e], tensor);
    }
    tensor = elements_of(tensor.contiguous(), shared, own);
  }
  return share;
}

std::vector<ParameterState> states_of_blocks(const ParameterState& share,
                                             const SharedBlocks& shared,
                                             const std::vector<size_t>& own) {
  std::vector<ParameterState> states(own.size());
  for_each_matrix(shared, own, [&](size_t k, size_t slot, size_t, int64_t row) {
    for (const Slots slots : kMatrixLists) {
      (states[k].*slots).push_back((share.*slots)[slot].narrow(0, row, 1));
    }
  });
  int64_t at = 0;
  for (size_t k = 0; k < own.size(); ++k) {
    const auto& sizes = shared.blocks[own[k]].rectangle.sizes;
    const int64_t elements = c10::multiply_integers(sizes);
    for (const Member member : kElementLists) {
      if ((share.*member).defined()) {
        states[k].*member = (share.*member).narrow(0, at, elements).view(sizes);
      }
    }
    for (const StateBuffer& buffer : kStateBuffers) {
      if (buffer.start != nullptr && (share.*buffer.start).defined()) {
        states[k].*buffer.start = (share.*buffer.start).clone();
      }
    }
    states[k].step = share.step.clone();
    at += elements;
  }
  return states;
}

bool join_states(std::vector<ParameterState*> states, const SharedBlocks& shared,
                 const std::vector<size_t>& own, const ParameterState& before,
                 const ParameterState& whole, ParameterState& share) {
  bool has_changed = false;
  std::vector<std::vector<at::Tensor*>> parts[std::size(kMatrixLists)];
  for (size_t s = 0; s < std::size(kMatrixLists); ++s) {
    parts[s].resize(slot_count(shared));
    for_each_matrix(shared, own, [&](size_t k, size_t slot, size_t mode, int64_t) {
      parts[s][slot].push_back(&(states[k]->*kMatrixLists[s])[mode]);
    });
    (share.*kMatrixLists[s]).resize(parts[s].size());
    for (size_t slot = 0; slot < parts[s].size(); ++slot) {
      const auto& slots = before.*kMatrixLists[s];
      const at::Tensor old = slot < slots.size() ? slots[slot] : at::Tensor();
      if (parts[s][slot].empty()) {
        const at::Tensor none = (whole.*kMatrixLists[s])[slot].narrow(0, 0, 0);
        (share.*kMatrixLists[s])[slot] =
            old.defined() ? old : at::empty_like(none, at::TensorOptions(shared.whole.device()));
        continue;
      }
      std::vector<int64_t> sizes = parts[s][slot].front()->sizes().vec();
      sizes[0] = static_cast<int64_t>(parts[s][slot].size());
      at::Tensor now = joined(parts[s][slot], sizes, has_changed);
      (share.*kMatrixLists[s])[slot] = kept(old, now);
    }
  }
  for (const Member member : kElementLists) {
    std::vector<at::Tensor*> elements;
    for (ParameterState* state : states) {
      if ((state->*member).defined()) {
        elements.push_back(&(state->*member));
      }
    }
    if (own.empty() && (whole.*member).defined()) {  // every rank has all keys
      const at::Tensor none =
          at::empty({0}, at::TensorOptions(shared.whole.device()).dtype(state_dtype(shared.whole)));
      share.*member = (before.*member).defined() ? before.*member : none;
    } else if (elements.empty()) {
      (share.*member).reset();
    } else {
      share.*member =
          kept(before.*member, joined(elements, {element_count(shared, own)}, has_changed));
    }
  }
  for (const StateBuffer& buffer : kStateBuffers) {
    if (buffer.start == nullptr) {
      continue;
    }
    at::Tensor& start = share.*buffer.start;
    if (!states.empty()) {
      start = states.front()->*buffer.start;
    } else if (!(share.*buffer.tensor).defined()) {
      start.reset();
    } else if ((before.*buffer.tensor).defined()) {
      start = before.*buffer.start;
    } else {
      start = share.step.clone();
    }
  }
  return has_changed;
}

std::vector<int64_t> presence_of(const ParameterState& share) {
  // A rank without a state has taken no step; others may have made theirs for one that failed.
  std::vector<int64_t> presence{share.is_empty() ? 1 : 0};
  for (const Member member :
       kElementLists) {  // a rank without blocks may have more keys than others
    presence.push_back((share.*member).defined() && (share.*member).numel() > 0 ? 1 : 0);
  }
  for (const StateBuffer& buffer : kStateBuffers) {
    if (buffer.start == nullptr) {
      continue;
    }
    const at::Tensor& average = share.*buffer.tensor;
    const at::Tensor& start = share.*buffer.start;
    const bool has_start = average.defined() && average.numel() > 0 && start.defined();
    presence.push_back(has_start ? 1 + start.to(at::kLong).item<int64_t>() : 0);
  }
  return presence;
}

ParameterState whole_frame(const ParameterState& share, const ParameterState& whole,
                           const SharedBlocks& shared, const std::vector<int64_t>& presence) {
  ParameterState frame;
  if (presence[0] == 1) {
    return frame;
  }
  for (const Slots slots : kMatrixLists) {
    frame.*slots = whole.*slots;
  }
  size_t key = 1;
  for (const Member member : kElementLists) {
    const bool is_empty = shared.whole.numel() == 0;  // no rank has a block of it
    if (presence[key++] != 0 || (is_empty && (whole.*member).defined())) {
      frame.*member = at::empty(shared.whole.sizes(),
                                at::TensorOptions(at::kMeta).dtype(state_dtype(shared.whole)));
    }
  }
  frame.step = share.step.clone();
  for (const StateBuffer& buffer : kStateBuffers) {
    if (buffer.start == nullptr) {
      continue;
    }
    const int64_t start = presence[key++];
    if (start != 0) {
      frame.*buffer.start = at::full_like(frame.step, start - 1);
    } else if (shared.whole.numel() == 0 && (frame.*buffer.tensor).defined()) {
      frame.*buffer.start = share.*buffer.start;
    }
  }
  return frame;
}

ParameterState whole_state(const ParameterState& share, const ParameterState& frame,
                           const SharedBlocks& shared, const distributed::Communicator& ranks) {
  if (frame.is_empty()) {
    return frame;
  }
  ParameterState result = frame;
  const std::vector<size_t> own = blocks_of(shared, ranks.rank());
  const at::TensorOptions on_device(shared.whole.device());
  std::vector<at::Tensor> parts;  // zeros where other ranks fill in
  for (const Slots slots : kMatrixLists) {
    for (at::Tensor& slot : result.*slots) {
      slot = at::zeros_like(slot, on_device);
      parts.push_back(slot);
    }
    for_each_matrix(shared, own, [&](size_t k, size_t slot, size_t, int64_t row) {
      (result.*slots)[slot]
          .select(0, shared.matrices[own[k]])
          .copy_((share.*slots)[slot].select(0, row));
    });
  }
  for (const Member member : kElementLists) {
    if (!(frame.*member).defined()) {
      continue;
    }
    at::Tensor all = at::zeros_like(frame.*member, on_device);
    int64_t at = 0;
    for (const size_t block : own) {
      at::Tensor part = block_of(all, shared, block);
      part.copy_((share.*member).narrow(0, at, part.numel()).view(part.sizes()));
      at += part.numel();
    }
    parts.push_back(all);
    result.*member = all;
  }
  ranks.combine_(parts);
  for (const Member member : kElementLists) {
    if ((result.*member).defined()) {  // in the memory layout of the parameter
      result.*member = parameter_shaped_zeros(shared.whole).copy_(result.*member);
    }
  }
  return result;
}

}  // namespace torchium::optim::detail
