#include "linalg/matrix_functions/matrix_groups.h"

#include <ATen/ops/cat.h>

#include <algorithm>

namespace torchium::linalg::detail {
namespace {

bool belong_together(const at::Tensor& A, const at::Tensor& B) {
  return A.scalar_type() == B.scalar_type() && A.device() == B.device() &&
         A.sym_size(-1) == B.sym_size(-1);
}

c10::SymIntArrayRef batch_of(const at::Tensor& batch) {
  return batch.sym_sizes().slice(0, batch.dim() - 2);
}

}  // namespace

std::vector<MatrixGroup> group_by_order(at::TensorList batches, int64_t enough) {
  struct Open {
    size_t group;  // that can still grow
    c10::SymInt elements;
  };
  std::vector<MatrixGroup> groups;
  std::vector<Open> open;  // one per kind of batch
  for (size_t i = 0; i < batches.size(); ++i) {
    auto found = std::find_if(open.begin(), open.end(), [&](const Open& each) {
      return belong_together(batches[groups[each.group].front()], batches[i]);
    });
    if (found == open.end()) {
      found = open.insert(open.end(), {groups.size(), 0});
      groups.emplace_back();
    } else if (found->elements >= enough) {
      *found = {groups.size(), 0};
      groups.emplace_back();
    }
    groups[found->group].push_back(i);
    found->elements += batches[i].sym_numel();
  }
  return groups;
}

at::Tensor joined_matrices(at::TensorList batches, const MatrixGroup& group) {
  const auto as_one_batch = [&](size_t i) {
    const auto batch = batch_of(batches[i]);
    const c10::SymInt n = batches[i].sym_size(-1);
    return batches[i].reshape_symint({c10::multiply_integers(batch), n, n});
  };
  if (group.size() == 1) {
    return as_one_batch(group.front());
  }
  std::vector<at::Tensor> parts;
  parts.reserve(group.size());
  for (const size_t i : group) {
    parts.push_back(as_one_batch(i));
  }
  return at::cat(parts);
}

std::vector<at::Tensor> split_by_buffer(const at::Tensor& result, at::TensorList batches,
                                        const MatrixGroup& group) {
  std::vector<at::Tensor> parts;
  parts.reserve(group.size());
  c10::SymInt start = 0;
  for (const size_t i : group) {
    const auto batch = batch_of(batches[i]);
    const c10::SymInt count = c10::multiply_integers(batch);
    std::vector<c10::SymInt> sizes(batch.begin(), batch.end());
    sizes.insert(sizes.end(), result.sym_sizes().begin() + 1, result.sym_sizes().end());
    parts.push_back(result.narrow_symint(0, start, count).view_symint(sizes));
    start += count;
  }
  return parts;
}

}  // namespace torchium::linalg::detail
