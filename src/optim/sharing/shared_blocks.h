// The blocks of all parameters and their owners.
#pragma once

#include "distributed/ownership.h"
#include "optim/blocked/block_update.h"
#include "optim/blocked/blocked_plans.h"
#include "optim/blocked/blocking.h"
#include "optim/sharing/sharing_rules.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torchium::optim::detail {

// The blocks of one parameter. Without matrices they are ranges of the flat parameter, or its
// shards.
struct SharedBlocks {
  at::Tensor param;  // of this rank
  at::Tensor whole;  // BlockedGroup::whole()
  distributed::Sharding sharding;
  std::vector<int64_t> dims;        // in which the rectangles are
  std::vector<int64_t> local_dims;  // of this rank's tensor: its part of each of them
  std::vector<BlockShape> shapes;
  std::vector<distributed::Block> blocks;  // in the order of the shapes
  std::vector<int64_t> matrices;           // of each block: its place in its slots
  std::vector<int64_t> owners;
  std::vector<std::vector<distributed::Part>> parts;  // of each block
};

// Throws for the state of a parameter that does not fit its blocks.
[[noreturn]] void refuse_other_blocks(const std::string& name);

// Owners stay while the parameter does: state would have to move. Groups are shared out one after
// the other, so that a group that is added later has the owners that it would have had before.
class BlockOwners {
 public:
  BlockOwners(const SharingRules& rules, int64_t rank, int64_t ranks)
      : rules_(rules), rank_(rank), ranks_(ranks) {}

  // Shares out the parameters that have none yet and may be stepped. Throws c10::ValueError if
  // options have changed that decide how a parameter with state is cut.
  void share_out(const std::vector<BlockedGroup>& groups);
  // Null: not shared out yet.
  const SharedBlocks* find(const at::Tensor& param) const;
  // The owners of its blocks; empty: not shared out yet.
  std::vector<int64_t> owners(const at::Tensor& param) const;
  // Sets the owners of the blocks of a parameter that is shared out later. For copies of an
  // optimizer, whose state is already a share.
  void give(const at::Tensor& param, std::vector<int64_t> owners);
  // Shares out the parameters of a group whose owners are given. Throws if a parameter has state,
  // and with its present options other blocks than it was made for.
  void share_out_given(const BlockedGroup& group, size_t g);

 private:
  struct Plan {
    std::vector<distributed::Block> blocks;
    std::vector<std::vector<distributed::Source>> sources;
  };
  static Plan plan_of(std::span<const SharedBlocks> cuts);
  const std::vector<int64_t>* given_to(const at::Tensor& param) const;
  std::vector<SharedBlocks> new_cuts(const BlockedGroup& group, size_t g) const;
  size_t take_given_owners(std::vector<SharedBlocks>& cuts);
  void choose_owners(std::span<SharedBlocks> cuts) const;
  void add(std::span<SharedBlocks> cuts);
  SharedBlocks cut(const BlockedGroup& group, size_t i) const;
  void cut_elements(SharedBlocks& result, int64_t unit) const;
  void cut_matrices(SharedBlocks& result, int64_t root_interval) const;

  const SharingRules& rules_;
  int64_t rank_, ranks_;
  std::vector<int64_t> load_;
  std::unordered_map<const at::TensorImpl*, SharedBlocks> of_;
  std::vector<std::pair<at::Tensor, std::vector<int64_t>>> given_;
};

// Of a rectangle that begins at `offsets` in a tensor that can be viewed as `dims`, in their order;
// none: it is not such rows.
std::optional<ElementRows> rows_of(const std::vector<int64_t>& dims,
                                   const std::vector<int64_t>& offsets,
                                   const std::vector<int64_t>& sizes);

// The elements of a block in a tensor that can be viewed as the dims of its parameter.
at::Tensor block_of(const at::Tensor& tensor, const SharedBlocks& of, size_t block);
// The elements of a part of a block in a tensor of the sizes of the block.
at::Tensor part_of_block(const at::Tensor& values, const distributed::Block& block,
                         const distributed::Part& part);
// The elements of a part in this rank's tensor, which can be viewed as its local dims, at `local`.
at::Tensor part_of_shard(const at::Tensor& tensor, const SharedBlocks& of,
                         const distributed::Part& part, const std::vector<int64_t>& local);

}  // namespace torchium::optim::detail
