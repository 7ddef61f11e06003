// The blocks of all parameters and their owners.
#pragma once

#include "distributed/ownership.h"
#include "optim/blocked/blocked_plans.h"
#include "optim/blocked/blocking.h"
#include "optim/sharing/sharing_rules.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace torchium::optim::detail {

// The blocks of one parameter. Without matrices they are ranges of the flat parameter.
struct SharedBlocks {
  at::Tensor param;
  std::vector<int64_t> dims;  // in which the rectangles are
  std::vector<BlockShape> shapes;
  std::vector<distributed::Block> blocks;  // in the order of the shapes
  std::vector<int64_t> matrices;           // of each block: its place in its slots
  std::vector<int64_t> owners;
};

// Owners stay while the parameter does: state would have to move. Groups are shared out one after
// the other, so that a group that is added later has the owners that it would have had before.
class BlockOwners {
 public:
  BlockOwners(const SharingRules& rules, int64_t ranks) : rules_(rules), ranks_(ranks) {}

  // Shares out the parameters that have none yet and may be stepped. Throws c10::ValueError if
  // options have changed that decide how a parameter with state is cut.
  void share_out(const std::vector<BlockedGroup>& groups);
  // Null: none yet.
  const SharedBlocks* find(const at::Tensor& param) const;

 private:
  SharedBlocks cut(const BlockedGroup& group, const at::Tensor& param) const;

  const SharingRules& rules_;
  int64_t ranks_;
  std::vector<int64_t> load_;
  std::unordered_map<const at::TensorImpl*, SharedBlocks> of_;
};

// The elements of a block in a tensor that can be viewed as the dims of its parameter.
at::Tensor block_of(const at::Tensor& tensor, const SharedBlocks& of, size_t block);

}  // namespace torchium::optim::detail
